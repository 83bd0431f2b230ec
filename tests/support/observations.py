"""Make observations, as the event loop collects them, for tests of the diagnosis."""

import signal
import sysconfig

from mpwatch import Worker
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.machine.transitions import StopReason
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.messages import Message, MessageKind
from mpwatch.wire.pickling import return_values


def make_observations(*ranks, stop_reason=StopReason.FAILED, stopped_at=10.0, **more):
    seen = {}
    for rank, what in enumerate(ranks):
        worker = Worker(
            rank=rank,
            local_rank=rank,
            world_size=len(ranks),
            local_world_size=len(ranks),
            role_rank=rank,
            role_world_size=len(ranks),
            run_id="test",
            master_addr="localhost",
            master_port=1,
        )
        seen[rank] = RankObservations(worker, pid=100 + rank, **{"was_ready": True, **what})
    return AttemptObservations(
        ranks=seen, hostname="here", run_started_at=0.0, stopped_at=stopped_at, stop_reason=stop_reason, **more
    )


def rank_that_raised(error, at):
    encoder = ExceptionEncoder(error)
    report = Message(MessageKind.RAISED, at, encoder.plain())
    return {"answer": report, "details": encoder.details(), "died_at": 11.0, "exit_code": -15}


def rank_that_died(code, at=10.0, sent=()):
    return {"died_at": at, "exit_code": code, "signals_sent": set(sent)}


def rank_that_returned(value=None):
    return {"answer": Message(MessageKind.RETURNED, 1.0, return_values.pack(value).body), "died_at": 11.0, "exit_code": 0}


STOPPED_RANK = rank_that_died(-15, 10.5, sent=[signal.SIGTERM, signal.SIGCONT])
CONNECTION_LOST_ERROR = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


def stack_in(function, line, source="", thread="Current thread 0x1"):
    """Return the stack of one thread in this function of train.py."""
    stack = f'{thread} (most recent call first):\n  File "/home/me/train.py", line {line} in {function}'
    return stack + (f"\n    {source}" if source else "")


LIBRARY = sysconfig.get_path("purelib")
IN_TORCH = f'Thread 0x1 (most recent call first):\n  File "{LIBRARY}/torch/distributed/c10d.py", line 3 in all_reduce'
PEER_TIMEOUT_ERROR = RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation")
