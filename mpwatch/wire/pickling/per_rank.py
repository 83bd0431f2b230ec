"""`PerRank`: an argument of which each rank gets its own value. Runs in the caller's process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")


class PerRank(Generic[T]):
    """An argument of a call of which each rank gets its own value: rank i gets `values[i]`.

    It can be any of the positional and keyword arguments of `mpwatch.run` and `WorkerGroup.run`, but not a part of one. Each
    rank unpickles its own value only. Large arrays and tensors are not copied for each rank.

    Args:
        values: one value for each rank, in the order of ranks. In a job of several nodes: one for each rank of the job, or
            one for each rank of this node.

    Raises:
        TypeError: the values are a string or a mapping, or cannot be iterated over.
    """

    def __init__(self, values: Iterable[T]) -> None:
        if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Iterable):
            raise TypeError(f"PerRank needs one value for each rank, such as PerRank([a, b]), not {values!r:.200}")
        self.values: tuple[T, ...] = tuple(values)

    def __repr__(self) -> str:
        return f"PerRank({list(self.values)!r:.200})"


def refuse_per_rank(_: PerRank[Any]) -> NoReturn:
    """Raise TypeError. This is the reducer of picklers of calls. They meet only those that are within another value."""
    raise TypeError("a PerRank must itself be one of args or kwargs, not a part of another value")
