"""What the function can ask and report in a rank: `current_worker`, `heartbeat`, `report`.

Runs in a rank. Every user of mpwatch imports it, so it imports nothing heavy.
"""

from __future__ import annotations

import operator
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mpwatch.options.worker_info import Worker
    from mpwatch.wire.shared_memory import HeartbeatWriter

_fields: dict[str, Any] | None = None  # of this rank's Worker; None outside a rank
_worker: Worker | None = None
_heartbeats: HeartbeatWriter | None = None


def set_rank(fields: dict[str, Any], heartbeats: HeartbeatWriter) -> None:
    """Make this process the rank with these fields of a `Worker`. A process that it forks sends no heartbeats."""
    global _fields, _heartbeats
    _fields = fields
    _heartbeats = heartbeats
    os.register_at_fork(after_in_child=_disable_heartbeats)


def _disable_heartbeats() -> None:
    global _heartbeats
    _heartbeats = None


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
