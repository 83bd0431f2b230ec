"""Functions for user code in a rank: `current_worker`, `heartbeat`, `report`, `should_stop`, `request_stop`.

Every rank imports this module, so this module imports no large modules.
"""

from __future__ import annotations

import operator
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from mpwatch.options.worker_info import Worker
    from mpwatch.wire.shared_memory import HeartbeatWriter
    from mpwatch.wire.stop_step import StopReader

_fields: dict[str, Any] | None = None  # the fields of this rank's Worker; None outside a rank
_worker: Worker | None = None
_heartbeats: HeartbeatWriter | None = None
_stop_reader: StopReader | None = None
_request_stop: Callable[[], object] | None = None
_is_stop_requested = False  # whether this rank has requested a stop in the present call


def set_rank(
    fields: dict[str, Any], heartbeats: HeartbeatWriter, stop_reader: StopReader, request_stop: Callable[[], object]
) -> None:
    """Make this process a rank. In a process that it forks, `heartbeat`, `report`, `should_stop` and `request_stop` do
    nothing.
    """
    global _fields, _heartbeats, _stop_reader, _request_stop
    _fields = fields
    _heartbeats = heartbeats
    _stop_reader = stop_reader
    _request_stop = request_stop
    os.register_at_fork(after_in_child=_leave_rank)


def _leave_rank() -> None:
    global _heartbeats, _stop_reader, _request_stop
    _heartbeats = _stop_reader = _request_stop = None


def begin_call() -> None:
    global _is_stop_requested
    _is_stop_requested = False
    if _stop_reader is not None:
        _stop_reader.begin_call()


def stop_heartbeats() -> None:
    """Record that no more heartbeats will come from this rank, because its function has returned."""
    if _heartbeats is not None:
        _heartbeats.stop()


def current_worker() -> Worker:
    """Return the Worker of the rank in which this code runs: its rank, local_rank, world_size and so on.

    The Worker's `state` is a dict in which the function can store anything. Every call of `current_worker` returns the same
    Worker, in every thread. `current_worker` raises RuntimeError outside a rank.
    """
    global _worker
    if _worker is None:
        if _fields is None:
            raise RuntimeError("current_worker() was called outside a rank; call it in a function that mpwatch runs")
        from mpwatch.options.worker_info import Worker

        _worker = Worker(**_fields)
    return _worker


def choose_part(count: int) -> int:
    """Return the index of this rank's value in a PerRank. Raises ValueError if there is neither one for each rank of the job
    nor one for each rank of this node.
    """
    worker = current_worker()
    if count == worker.world_size:
        return worker.rank
    if count == worker.local_world_size:
        return worker.local_rank
    raise ValueError(
        f"the number of values of a PerRank is {count}, but the number of ranks is {worker.world_size} in the job, and "
        f"{worker.local_world_size} on this node; pass one value for each rank of the job, or one for each rank of this node"
    )


def heartbeat() -> None:
    """Report to the watcher that this rank makes progress. `heartbeat_timeout` applies from the first heartbeat on.

    A heartbeat takes less than a microsecond and works in any thread. Outside a rank, and in a process that a rank has
    forked, `heartbeat()` does nothing.
    """
    if _heartbeats is not None:
        _heartbeats.write_heartbeat()


def report(*, step: int | None = None, total: int | None = None, **metrics: float) -> None:
    """Report the progress of this rank. The last report is in `RunResult.progress`, even if the rank fails.

    A report counts as a heartbeat. A report takes a few microseconds and works in any thread. Outside a rank, and in a
    process that a rank has forked, `report()` does nothing.

    Args:
        step: number of steps done.
        total: number of steps to do.
        metrics: the names and values of the metrics. A value may also be an array or a tensor with one element. If the
            tensor is on a GPU, `report()` waits for the GPU.

    Raises:
        TypeError: a value is not a number.
        ValueError: the report has more than about 4,000 bytes.
    """
    if _heartbeats is not None:
        numbers = {name: value if type(value) is float else _to_float(name, value) for name, value in metrics.items()}
        _heartbeats.write_report(_to_int("step", step), _to_int("total", total), numbers)


def should_stop(step: int) -> bool:
    """Return whether this rank should save its state and return now, before it does this step.

    A stop is requested by a signal of the option `stop`, by `request_stop()`, or by `StopPolicy(after=...)`. Before a stop
    is requested, `should_stop` returns False. After a stop request, the ranks agree on one step: the first step that no rank
    has begun. At the agreed step, `should_stop` returns True on all ranks. So all ranks can save the same state, and no rank
    waits in a collective for a rank that has stopped:

        for step in range(first_step, steps):
            if mpwatch.should_stop(step):
                return save(step)
            train(step)

    Call `should_stop` in every rank at the same steps, always in the same thread. If a step is lower than the previous step,
    a new epoch begins. The steps of the new epoch come after all steps of the previous epoch. If a rank has returned, or
    never calls `should_stop`, the other ranks do not wait for this rank. For example, if rank 0 returns after step 9 and a
    stop is requested later, the other ranks finish step 9 before they stop. If rank 0 has only 10 steps and the other ranks
    stop at step 20, rank 0 ends normally: `should_stop` never returns True in rank 0. With `RestartPolicy(scope="worker")`,
    ranks do not communicate, so each rank stops at its own next step.

    A call of `should_stop` takes a fraction of a microsecond. When a stop is requested, `should_stop` waits until the ranks
    agree on the step. The agreement takes some milliseconds, or some tenths of a second with several nodes. If a node is
    lost, `should_stop` can wait for up to `node_timeout` seconds. Outside a rank, and in a process that a rank has forked,
    `should_stop` returns False.

    Args:
        step: the number of the step that comes next.

    Raises:
        TypeError: the step is not an int.
        ValueError: the step has more than 64 bits.
    """
    if _stop_reader is None:
        return False
    return _stop_reader.should_stop(step if type(step) is int else _to_step(step))


def request_stop() -> bool:
    """Ask all ranks to save their state and return.

    After a call of `request_stop`, `should_stop` returns True on all ranks at the same step. The request of a rank in a run
    is for all ranks of this run, on all nodes. The request of a rank in a WorkerGroup is for all ranks that run the same
    call. If a rank has started other ranks with `mpwatch.run`, the rank's request does not stop these other ranks.

    The program that has started the ranks can call `request_stop`, too. This request is for all unfinished runs of the
    program, and for all calls of a WorkerGroup that have begun. To stop a single run or call, use `RunHandle.request_stop`.

    Any thread, observer or signal handler may call `request_stop`. If the ranks have already been asked to stop, another
    request changes nothing for these ranks. `request_stop` does not end `mpwatch.map`. To end `mpwatch.map`, leave the loop
    over its results.

    Returns:
        Whether the request was sent to any rank. It is False if this process is no rank and has no ranks that work.
    """
    global _is_stop_requested
    if _request_stop is None:
        # If this module is not loaded, this process has started no ranks. A rank must not import the watcher's modules.
        running_calls = sys.modules.get("mpwatch.watcher.running_calls")
        return running_calls is not None and bool(running_calls.request_stop("request_stop()"))
    if not _is_stop_requested:
        _is_stop_requested = True
        _request_stop()
    return True


def _to_step(value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"should_stop() takes the step as an int, not a {type(value).__qualname__}") from None


def _to_float(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is not a number")
        return float(value.item() if hasattr(value, "item") else value)  # an array or a tensor
    except Exception as error:  # noqa: BLE001  the value's class may raise anything
        raise TypeError(f"report() takes numbers; {name} is a {type(value).__qualname__} ({error})") from None


def _to_int(name: str, value: object) -> int | None:
    try:
        return None if value is None else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"report() takes {name} as an int, not a {type(value).__qualname__}") from None
