"""`PerRank` is an argument with one value for each rank. This module runs in the caller's process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")


class PerRank(Generic[T]):
    """Gives each rank its own value of an argument: rank i gets `values[i]`.

    Any positional or keyword argument of `mpwatch.run` and `WorkerGroup.run` can be a PerRank. A PerRank cannot be inside
    another argument, such as a list. Each rank unpickles only its own value of the PerRank. All ranks read large arrays and
    tensors from one shared file, so unpickling does not copy them.

    Args:
        values: one value for each rank, in the order of ranks. In a job of several nodes, pass one value for each rank of
            the job, or one value for each rank of this node.

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
    raise TypeError("a PerRank must itself be one of args or kwargs, not a part of another value")
