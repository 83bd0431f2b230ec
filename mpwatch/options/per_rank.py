"""Checks of `PerRank` arguments: which arguments of a call they are, and whether they have a value for each rank."""

from collections.abc import Iterable, Mapping
from typing import Any

from mpwatch.wire.pickling.per_rank import PerRank

__all__ = ["PerRank", "check_per_rank", "find_per_rank", "format_argument"]


def find_per_rank(args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[int | str, PerRank[Any]]:
    """Return the arguments that are PerRank, by position or name."""
    found: dict[int | str, PerRank[Any]] = {i: value for i, value in enumerate(args) if isinstance(value, PerRank)}
    return found | {name: value for name, value in kwargs.items() if isinstance(value, PerRank)}


def format_argument(key: int | str) -> str:
    """Return an argument for a message: `args[0]` or `kwargs['x']`."""
    return f"args[{key}]" if isinstance(key, int) else f"kwargs[{key!r}]"


def check_per_rank(args: Iterable[Any], kwargs: Mapping[str, Any], nprocs: int, *, is_multi_node: bool = False) -> None:
    """Check that each PerRank has one value for each rank. Raises ValueError.

    On several nodes the number of ranks is not known before the nodes have met. Then only their equality is checked; a rank
    checks the number.
    """
    found = find_per_rank(args, kwargs)
    counts = {len(value.values) for value in found.values()}
    for key, value in found.items():
        name = format_argument(key)
        if not is_multi_node and len(value.values) != nprocs:
            raise ValueError(f"{name} is a PerRank of {len(value.values)} values, but there are {nprocs} ranks")
        if len(counts) > 1:
            raise ValueError(f"all PerRank arguments of a call must have the same number of values, not {sorted(counts)}")
