"""What the function can ask and report in a rank: `current_worker`, `heartbeat`, `report`, `should_stop`, `request_stop`.

Runs in a rank. Every user of mpwatch imports it, so it imports nothing heavy.
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

_fields: dict[str, Any] | None = None  # of this rank's Worker; None outside a rank
_worker: Worker | None = None
_heartbeats: HeartbeatWriter | None = None
_stop_reader: StopReader | None = None
_request_stop: Callable[[], object] | None = None
_is_stop_requested = False  # by this rank, in the present call


def set_rank(
    fields: dict[str, Any], heartbeats: HeartbeatWriter, stop_reader: StopReader, request_stop: Callable[[], object]
) -> None:
    """Make this process a rank. A process that it forks sends no heartbeats, and neither stops nor asks others to stop.

    Args:
        fields: of its Worker.
        heartbeats: writes its heartbeats.
        stop_reader: knows when it stops.
        request_stop: asks the watcher to stop all ranks.
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
    """Forget the steps of the previous call."""
    global _is_stop_requested
    _is_stop_requested = False
    if _stop_reader is not None:
        _stop_reader.begin_call()


def stop_heartbeats() -> None:
    """Stop the heartbeats, because the function has returned."""
    if _heartbeats is not None:
        _heartbeats.stop()


def current_worker() -> Worker:
    """Return the Worker of the rank in which this code runs: its rank, local_rank, world_size and so on.

    `state` is a dict for the function's own use. Every call returns the same object, in every thread. Raises RuntimeError
    outside a rank.
    """
    global _worker
    if _worker is None:
        if _fields is None:
            raise RuntimeError("current_worker() was called outside a rank; call it in a function that mpwatch runs")
        from mpwatch.options.worker_info import Worker

        _worker = Worker(**_fields)
    return _worker


def choose_part(count: int) -> int:
    """Return which of the `count` values of a PerRank is for this rank. Raises ValueError."""
    worker = current_worker()
    if count == worker.world_size:
        return worker.rank
    if count == worker.local_world_size:
        return worker.local_rank
    raise ValueError(
        f"a PerRank has {count} values, but the job has {worker.world_size} ranks, and this node {worker.local_world_size}; "
        "pass one value for each rank of the job, or one for each rank of this node"
    )


def heartbeat() -> None:
    """Report to the watcher that this rank makes progress. `heartbeat_timeout` applies from the first heartbeat on.

    It takes less than a microsecond and works in any thread. It does nothing outside a rank, or in a process that a rank
    has forked.
    """
    if _heartbeats is not None:
        _heartbeats.write_heartbeat()


def report(*, step: int | None = None, total: int | None = None, **metrics: float) -> None:
    """Report the progress of this rank. The last report is in `RunResult.progress`, even if the rank fails.

    A report counts as a heartbeat. It takes a few microseconds and works in any thread. It does nothing outside a rank, or
    in a process that a rank has forked.

    Args:
        step: number of steps done.
        total: number of steps to do.
        metrics: numbers by name. Arrays and tensors with one element count as numbers; one on a GPU makes this call wait.

    Raises TypeError for a value that is not a number, ValueError for a report of more than about 4,000 bytes.
    """
    if _heartbeats is not None:
        numbers = {name: value if type(value) is float else _to_float(name, value) for name, value in metrics.items()}
        _heartbeats.write_report(_to_int("step", step), _to_int("total", total), numbers)


def should_stop(step: int) -> bool:
    """Return whether this rank should save and return now, before it does this step.

    The answer is False until a stop is requested: by a signal in `stop_signals`, by `request_stop()` or by `stop_after`.
    Then it is True on all ranks at one and the same step: the first one that no rank has passed. So all ranks can save the
    same state, and no rank waits in a collective for one that has stopped:

        for step in range(first_step, steps):
            if mpwatch.should_stop(step):
                return save(step)
            train(step)

    Ask in every rank at the same steps, in one thread. A step that is lower than the one before begins a new epoch: its
    steps follow those of the epoch before. A rank that has returned, or that never asks, does not keep the others waiting.
    If a rank has returned after its last step, the others go on to that step, and may end without the answer True. With
    scope="worker" ranks do not communicate, so each rank stops at its own next step.

    It takes a fraction of a microsecond. When a stop is requested, the rank waits some milliseconds until the step is agreed
    on; on several nodes some tenths of a second, or `node_timeout` if a node is lost. Outside a rank, and in a process that
    a rank has forked, the answer is False.

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
    """Ask all ranks to save and return: `should_stop` becomes True on all of them at one and the same step.

    In a rank it is for all ranks of the run, on all nodes, or of the call of a WorkerGroup; not for ranks that this rank has
    started itself. In the process that has started ranks it is for all runs and calls that are under way. Any thread, any
    observer and any signal handler may call it. See `RunHandle.request_stop` and `CallHandle.request_stop` for one run or
    call. A further request changes nothing. `mpwatch.map` goes on with its items: leave its loop to end it.

    Returns:
        Whether there was anybody to ask. False in a process that is not a rank and has no ranks at work.
    """
    global _is_stop_requested
    if _request_stop is None:
        # Without this module, this process has started no ranks. A rank must not import the watcher's modules.
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
    except Exception as error:  # noqa: BLE001  from the code of its class
        raise TypeError(f"report() takes numbers; {name} is a {type(value).__qualname__} ({error})") from None


def _to_int(name: str, value: object) -> int | None:
    try:
        return None if value is None else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"report() takes {name} as an int, not a {type(value).__qualname__}") from None
