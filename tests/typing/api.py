"""The public names as a user writes them. `type: ignore` marks a mistake that mypy and pyright must report. Never run."""

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, assert_type

import mpwatch
from mpwatch import PerRank, ProcessFailure, RunFailedError, RunResult, RunTimeoutError, Worker, WorkerSpec, events
from mpwatch.integrations import dask, ray, submitit


def train(lr: float, *, epochs: int = 1) -> list[float]:
    return [lr] * epochs


result = mpwatch.run(train, nprocs=2, args=(0.1,), kwargs={"epochs": 3}, backend="gloo", timeout=60, grace_period=1.5)
assert_type(mpwatch.__version__, str)
assert_type(result, RunResult[list[float]])
assert_type(result[0], list[float])
assert_type(result[-2:], list[list[float]])
rows: Sequence[list[float]] = result
for value in result:
    assert_type(value, list[float])
assert_type(mpwatch.run(lambda: 3, 2)[0], int)
assert_type(mpwatch.main(train, 2), RunResult[list[float]])
assert_type(mpwatch.main(mpwatch.Script("--lr", "0.1", module="pkg.train"), nprocs=2), RunResult[None])
stopping = mpwatch.run(train, 2, stop=mpwatch.StopPolicy((signal.SIGUSR1,), after=3600, timeout=60.0))
assert_type(stopping.stopped_at, int | None)
assert_type(stopping.slow_rank, mpwatch.Lateness | None)
assert_type(stopping.stop_cause, str)
assert_type(mpwatch.should_stop(3), bool)
assert_type(mpwatch.request_stop(), bool)
handle = mpwatch.submit(train, 2, args=(0.1,), backend="gloo")
assert_type(handle, mpwatch.RunHandle[list[float]])
assert_type(handle.result(timeout=3.0)[0], list[float])
assert_type(handle.progress()[0].step, int | None)
assert_type(handle.workers[0].rank, int)
with mpwatch.submit(train, 2) as stopped:
    assert_type(stopped.stacks()[0], str)


async def wait_for_run() -> None:
    assert_type(await mpwatch.submit(train, 2), RunResult[list[float]])


with mpwatch.WorkerGroup(2, preload=["torch"]) as preloaded:
    assert_type(preloaded.run(train, (PerRank([0.1, 0.2]),))[0], list[float])
    call = preloaded.submit(train, (0.1,), ranks=1, timeout=3.0)
    assert_type(call, mpwatch.RunHandle[list[float]])
    call.terminate()
assert_type(PerRank([0.1, 0.2]), PerRank[float])
assert_type(mpwatch.run(train, 2, args=(PerRank([0.1, 0.2]),))[0], list[float])


mpwatch.run(train, "auto", env=lambda worker: {"SHARD": str(worker.rank)}, check=False)
mpwatch.run(
    train, 2, logs=mpwatch.LogSpec(Path("logs"), show={"stdout": {0, 1}, "stderr": "all"}, files="none", prefix="{rank} ")
)
assert_type(result.log_dir, str)
assert_type(result.progress[0].step, int | None)
spec = WorkerSpec(fn=train, nprocs=4)
assert_type(spec, WorkerSpec[list[float]])

try:
    mpwatch.run(train, 2)
except RunTimeoutError as error:
    assert_type(error.exit_code, int)
except RunFailedError as error:
    assert_type(error.root_cause, ProcessFailure | None)
    assert_type(error.result, RunResult[Any])
    assert_type(error.result.failures, Mapping[int, ProcessFailure])
    assert_type(error.result.verdict, str)
    assert_type(error.result.fates, list[str])
    error.verdict  # type: ignore[attr-defined]

with mpwatch.WorkerGroup(4, backend="gloo", timeout=60, progress=False) as group:
    assert_type(group.run(train, (0.1,), {"epochs": 3}), RunResult[list[float]])
    assert_type(group.run(str, args=(5,))[0], str)
    assert_type(group.workers, tuple[Worker, ...])
    assert_type(group.state, mpwatch.WorkerState)
    group.run(train, 0.1)  # type: ignore[arg-type]

worker: Worker = mpwatch.current_worker()
worker.state["seen"] = True
mpwatch.heartbeat()
mpwatch.report(step=1, total=10, loss=0.5, lr=1)

policy = mpwatch.RestartPolicy(3, scope="worker", delay=1.0, retry_if=(OSError, mpwatch.FailureKind.SIGNAL), reset_after=60)
story = mpwatch.run(train, 2, max_restarts=policy, on_event=[print, events.JsonLines("events.jsonl")])
assert_type(story.attempts, tuple[mpwatch.Attempt, ...])
assert_type(story.events, tuple[mpwatch.Event, ...])


def observe(event: mpwatch.Event) -> None:
    if isinstance(event, events.WorkerFailed):
        assert_type(event.failure, ProcessFailure)


def observe_progress(event: events.Progressed) -> None:
    assert_type(event.step, int | None)
    assert_type(event.metrics, Mapping[str, float])


mpwatch.run(train, 2, max_restarts=3, on_event=observe, on_progress=observe_progress)
farm = mpwatch.run(train, 2, keep_going=True, check=False)
assert_type(farm.return_values, Mapping[int, list[float]])
assert_type(farm.notes, tuple[str, ...])
mpwatch.RestartPolicy(retry_if=lambda failure: failure.kind is not mpwatch.FailureKind.OOM)
mpwatch.RestartPolicy(scope="node")  # type: ignore[arg-type]


mpwatch.run(train, 2, placement=mpwatch.Placement("cores", gpus="own"))
mpwatch.run(train, 2, placement=lambda worker: range(worker.local_rank, 8))
mpwatch.run(train, 2, placement="sockets")  # type: ignore[call-overload]
mpwatch.run(train, 2, placement=mpwatch.Placement(gpus="all"))  # type: ignore[arg-type]

mpwatch.run(train, nprocs=2.5)  # type: ignore[call-overload]
mpwatch.run(train, 2, (0.1,))  # type: ignore[call-overload]
mpwatch.run(train, "many")  # type: ignore[call-overload]
mpwatch.report(loss="low")  # type: ignore[arg-type]


def count_letters(path: Path) -> int:
    return len(path.name)


items = [Path("a"), Path("b")]
for letters in mpwatch.map(count_letters, items, 2, chunksize=3, buffersize=10, env={"A": "b"}):
    assert_type(letters, int)
for index, letters in mpwatch.map(count_letters, iter(items), 2, ordered=False):
    assert_type((index, letters), tuple[int, int])
for outcome in mpwatch.map(count_letters, items, "auto", on_error="yield", max_restarts=2):
    assert_type(outcome, int | mpwatch.ItemFailure)
    if isinstance(outcome, mpwatch.ItemFailure):
        assert_type(outcome.failure, ProcessFailure)
for pair in mpwatch.map(count_letters, items, 2, ordered=False, on_error="yield"):
    assert_type(pair, tuple[int, int | mpwatch.ItemFailure])
mpwatch.map(count_letters, [1, 2], 2)  # type: ignore[arg-type]
mpwatch.WorkerGroup(2, scope="rank")  # type: ignore[arg-type]

cluster: Any = None


def launch(fn: Callable[..., list[float]], **options: Unpack[mpwatch.RunOptions]) -> RunResult[list[float]]:
    """A function of a library that passes the options on."""
    return mpwatch.run(fn, 2, **options)


launch(train, args=(0.1,), timeout=60, max_restarts=mpwatch.RestartPolicy(2), backend=mpwatch.Backend("gloo", timeout=60))
launch(train, timeuot=60)  # type: ignore[call-arg]
launch(train, max_restarts="2")  # type: ignore[arg-type]

mpwatch.run(train)  # type: ignore[call-overload]
mpwatch.run(train, 2, timeuot=60)  # type: ignore[call-overload]
mpwatch.run(train, 2, timeout="60")  # type: ignore[call-overload]
mpwatch.run(train, 2, backend=mpwatch.Backend("gloo", stall=3))  # type: ignore[call-arg]
mpwatch.run(train, 2, stop=3600)  # type: ignore[call-overload]
mpwatch.run(train, 2, debug="local")  # type: ignore[call-overload]
mpwatch.submit(train, 2, timeuot=60)  # type: ignore[call-overload]
mpwatch.main(train, 2, check=False)  # type: ignore[call-overload]
mpwatch.WorkerGroup(2, max_restarts=3)  # type: ignore[call-arg]
mpwatch.WorkerGroup(2, heartbeat_timeout="60")  # type: ignore[arg-type]
mpwatch.map(train, [0.1], 2, timeout=60)  # type: ignore[call-overload]
mpwatch.map(train, [0.1], 2, max_restarts=0.5)  # type: ignore[call-overload]
ray.run(train, 2, nodes=2, timeuot=60)  # type: ignore[call-arg]
dask.run(cluster, train, 2, nodes=2, grace_period="1")  # type: ignore[arg-type]
submitit.run(cluster, train, 2, nodes=2, rendezvous=None)  # type: ignore[call-arg]
mpwatch.WorkerSpec(fn=train, nprocs=2, timeuot=60)  # type: ignore[call-arg]
mpwatch.run(spec, timeout=60)  # type: ignore[call-overload]
