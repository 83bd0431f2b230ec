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
    from mpwatch.wire.shared_memory import RankSlot

_fields: dict[str, Any] | None = None  # the fields of this rank's Worker; None outside a rank
_worker: Worker | None = None
_slot: RankSlot | None = None
_request_stop: Callable[[], object] | None = None
_is_stop_requested = False  # whether this rank has requested a stop in the present call


def set_rank(fields: dict[str, Any], slot: RankSlot, request_stop: Callable[[], object]) -> None:
    """Make this process a rank. In a process that it forks, its functions do nothing."""
    global _fields, _slot, _request_stop
    _fields, _slot, _request_stop = fields, slot, request_stop
    os.register_at_fork(after_in_child=_leave_rank)


def _leave_rank() -> None:
    global _slot, _request_stop
    _slot = _request_stop = None


def begin_call() -> None:
    global _is_stop_requested
    _is_stop_requested = False
    if _slot is not None:
        _slot.steps.begin_call()


def stop_heartbeats() -> None:
    if _slot is not None:
        _slot.stop_heartbeats()


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
    """Return the index of this rank's value in a PerRank. Raises ValueError."""
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
    if _slot is not None:
        _slot.write_heartbeat()


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
    if _slot is not None:
        numbers = {str(name): value if type(value) is float else _to_float(name, value) for name, value in metrics.items()}
        _slot.write_report(
            None if step is None else _to_int("report() takes step", step),
            None if total is None else _to_int("report() takes total", total),
            numbers,
        )


def should_stop(step: int) -> bool:
    """Return whether this rank should save and return now, before this step.

    A stop is requested by a signal of the option `stop`, by `request_stop()`,
    or by `StopPolicy(after=...)`. Then the ranks agree on the first step that
    none of them has begun, and `should_stop` returns True on all of them at
    this step. So all save the same state, and none waits in a collective for
    one that has stopped:

        for step in range(first_step, steps):
            if mpwatch.should_stop(step):
                return save(step)
            train(step)

    Call it in every rank at the same steps, always in the same thread. A step
    lower than the previous one begins a new epoch, whose steps come after all
    steps before. The others do not wait for a rank that has returned, or never
    calls `should_stop`: if rank 0 returns after step 9, they finish step 9
    before they stop. If they stop at step 20 and rank 0 has only 10 steps, it
    ends normally and never sees True. With `RestartPolicy(scope="worker")`,
    ranks do not communicate, and each stops at its own next step.

    A call takes a fraction of a microsecond. After a request it waits until the
    ranks agree: some milliseconds, some tenths of a second with several nodes,
    up to `node_timeout` if a node is lost. Outside a rank, and in a process
    that a rank has forked, it returns False.

    Args:
        step: the number of the step that comes next.

    Raises:
        TypeError: the step is not an int.
        ValueError: the step has more than 64 bits.
    """
    if _slot is None:
        return False
    return _slot.steps.should_stop(step if type(step) is int else _to_int("should_stop() takes the step", step))


def request_stop() -> bool:
    """Ask all ranks to save their state and return.

    `should_stop` then returns True on all ranks at the same step. In a rank,
    this is a request to all ranks of its run, on all nodes, or to all that run
    the same call of a WorkerGroup; not to ranks that a rank has started with
    `mpwatch.run`. In the program that has started ranks, it is a request to all
    its unfinished runs and to all calls of a WorkerGroup that have begun.
    `RunHandle.request_stop` stops a single one.

    Any thread, observer or signal handler may call it, and a second request
    changes nothing. It does not end `mpwatch.map`: leave the loop over its
    results.

    Returns:
        Whether the request was sent to any rank. It is False if this process is
        no rank and has no ranks that work.
    """
    global _is_stop_requested
    if _request_stop is None:
        # If this module is not loaded, this process has started no ranks. A rank must not import the watcher's modules.
        registry = sys.modules.get("mpwatch.watcher.registry")
        return registry is not None and bool(registry.request_stop("request_stop()"))
    if not _is_stop_requested:
        _is_stop_requested = True
        _request_stop()
    return True


def _to_float(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is not a number")
        return float(value.item() if hasattr(value, "item") else value)  # an array or a tensor
    except Exception as error:  # noqa: BLE001  the value's class may raise anything
        raise TypeError(f"report() takes numbers; {name} is a {type(value).__qualname__} ({error})") from None


def _to_int(what: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} as an int, not a {type(value).__qualname__}") from None
