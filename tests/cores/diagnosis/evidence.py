"""What the watcher saw of ranks, made by hand for tests of the diagnosis."""

import signal
import sysconfig

from mpwatch import Collective, CollectiveState, Worker
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.diagnose import diagnose
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.machine.transitions import StopReason
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.messages import Message, MessageKind
from mpwatch.wire.pickling import return_values

STOPPED_AT = 10.0


def observe(*ranks, stop_reason=StopReason.FAILED, stopped_at=STOPPED_AT, **more):
    seen = {}
    for rank, what in enumerate(ranks):
        size = {"world_size": len(ranks), "local_world_size": len(ranks), "role_world_size": len(ranks)}
        store = {"run_id": "test", "master_addr": "localhost", "master_port": 1}
        worker = Worker(rank=rank, local_rank=rank, role_rank=rank, **size, **store)
        seen[rank] = RankObservations(worker, pid=100 + rank, **{"was_ready": True, **what})
    return AttemptObservations(
        ranks=seen, hostname="here", run_started_at=0.0, stopped_at=stopped_at, stop_reason=stop_reason, **more
    )


def judge(*ranks, **more):
    return diagnose(observe(*ranks, **more))


def raised(error, at=9.0, **more):
    encoder = ExceptionEncoder(error)
    report = Message(MessageKind.RAISED, at, encoder.plain())
    return {"answer": report, "details": encoder.details(), "died_at": 11.0, "exit_code": -15, **more}


def died(code, at=STOPPED_AT, sent=(), **more):
    return {"died_at": at, "exit_code": code, "signals_sent": set(sent), **more}


def returned(value=None, **more):
    answer = Message(MessageKind.RETURNED, 1.0, return_values.pack(value).body)
    return {"answer": answer, "died_at": 11.0, "exit_code": 0, **more}


def stopped(stacks="", **more):
    return died(-15, 10.5, sent=[signal.SIGTERM, signal.SIGCONT], stacks=stacks, **more)


STOPPED = stopped()
LOST_PEER = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
LATE_PEER = RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation")

LIBRARY = sysconfig.get_path("purelib")
HEAD = "Thread 0x1 (most recent call first):\n"


def stack(function="step", line=3, source="", file="/home/me/train.py"):
    return f'{HEAD}  File "{file}", line {line} in {function}' + (f"\n    {source}" if source else "")


def stack_in_torch(function="all_reduce", file="distributed/c10d.py", source="work.wait()"):
    """The stack of a rank in this function of torch, which its function `step` has called."""
    user = stack("step", 3, "step()").removeprefix(HEAD)
    return f"{stack(function, 9, source, f'{LIBRARY}/torch/{file}')}\n{user}"


IN_C10D = stack("all_reduce", 3, "work.wait()", f"{LIBRARY}/torch/distributed/c10d.py")
WAITS = stopped(IN_C10D)
WAITS_ELSEWHERE = stopped(IN_C10D.replace("all_reduce", "barrier"))
LOADS = stopped(stack("load", 12, "sleep(60)"))


def call(name, sequence, *shape, state=CollectiveState.COMPLETED, dtype="float32", ranks=(0, 1, 2), group="default", **more):
    shapes, dtypes = ((shape,), (dtype,)) if shape else ((), ())
    sizes = {"input_shapes": shapes, "output_shapes": shapes, "input_dtypes": dtypes, "output_dtypes": dtypes}
    return Collective(name=name, sequence=sequence, group=group, ranks=ranks, state=state, **{**sizes, **more})


def waiting(name, sequence, *shape, **more):
    return call(name, sequence, *shape, state=CollectiveState.WAITING, **more)


def answer(rank, *calls, **more):
    return RankCollectives(collectives=calls, **{"torch_rank": rank, **more})
