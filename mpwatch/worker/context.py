"""Who this rank is and how it fares, for the function that runs in it. Runs in a rank; imported by anybody, so it imports
nothing heavy.
"""

from __future__ import annotations

import operator
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mpwatch.options.worker_info import Worker
    from mpwatch.wire.shared_memory import HeartbeatWriter

_fields: dict[str, Any] | None = None  # set in a rank, for as long as it lives
_worker: Worker | None = None
_pulse: HeartbeatWriter | None = None


def enter(fields: dict[str, Any], pulse: HeartbeatWriter) -> None:
    """This process is the rank that these fields of a `Worker` describe. One that it forks has a pulse that nobody feels."""
    global _fields, _pulse
    _fields = fields
    _pulse = pulse
    os.register_at_fork(after_in_child=_lose_pulse)


def _lose_pulse() -> None:
    global _pulse
    _pulse = None


def function_has_returned() -> None:
    """From here on the rank cannot say any more that it gets on."""
    if _pulse is not None:
        _pulse.rest()


def current_worker() -> Worker:
    """The rank this code runs in: its rank, local_rank, world_size and so on, and `state`, a dict of its own.

    The same object at every call, in every thread. Raises RuntimeError outside a rank.
    """
    global _worker
    if _worker is None:
        if _fields is None:
            raise RuntimeError("current_worker() was called outside a rank: only a function run by mpwatch has one")
        from mpwatch.options.worker_info import Worker

        _worker = Worker(**_fields)
    return _worker


def heartbeat() -> None:
    """Say that this rank gets on with its work. From the first one on, `heartbeat_timeout` holds for it.

    Costs less than a microsecond, in any thread. Does nothing outside a rank, and in a process that a rank has forked.
    """
    if _pulse is not None:
        _pulse.beat()


def report(*, step: int | None = None, total: int | None = None, **metrics: float) -> None:
    """Say how far this rank has come; a heartbeat, too. The last one is in `RunResult.progress`, also if the rank fails.

    Costs a few microseconds, in any thread. Does nothing outside a rank, and in a process that a rank has forked.

    Args:
        step: number of steps done.
        total: number of steps to do.
        metrics: numbers, by name: of Python, or arrays and tensors of one element (a GPU is waited for).

    Raises TypeError for what is no number, ValueError for what takes more than about 4,000 bytes.
    """
    if _pulse is not None:
        numbers = {name: value if type(value) is float else _number(name, value) for name, value in metrics.items()}
        _pulse.report(_count("step", step), _count("total", total), numbers)


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is no number")
        return float(value.item() if hasattr(value, "item") else value)  # of NumPy, or a tensor
    except Exception as error:  # noqa: BLE001  whatever its class raises
        raise TypeError(f"report() takes numbers; {name} is a {type(value).__qualname__} ({error})") from None


def _count(name: str, value: object) -> int | None:
    try:
        return None if value is None else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"report() takes {name} as an int, not a {type(value).__qualname__}") from None
