"""Who this rank is, for the function that runs in it. Runs in a rank; imported by anybody, so it imports nothing heavy."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..spec import Worker

__all__ = ["current_worker", "enter"]

_fields: dict[str, Any] | None = None  # set in a rank, for as long as it lives
_worker: Worker | None = None


def enter(fields: dict[str, Any]) -> None:
    """This process is the rank that these fields of a `Worker` describe."""
    global _fields
    _fields = fields


def current_worker() -> Worker:
    """The rank this code runs in: its rank, local_rank, world_size and so on, and `state`, a dict of its own.

    The same object at every call, in every thread. Raises RuntimeError outside a rank.
    """
    global _worker
    if _worker is None:
        if _fields is None:
            raise RuntimeError("current_worker() was called outside a rank: only a function run by mpwatch has one")
        from ..spec import Worker

        _worker = Worker(**_fields)
    return _worker
