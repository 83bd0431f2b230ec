"""Find the `PerRank` arguments of a call, and check that they have a value for each rank."""

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex

from mpwatch.results.texts import format_count
from mpwatch.wire.pickling.per_rank import PerRank

__all__ = ["PerRank", "check_per_rank", "find_per_rank", "format_argument"]


def find_per_rank(args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[int | str, PerRank[Any]]:
    found: dict[int | str, PerRank[Any]] = {i: value for i, value in enumerate(args) if isinstance(value, PerRank)}
    return found | {name: value for name, value in kwargs.items() if isinstance(value, PerRank)}


def format_argument(key: int | str) -> str:
    return f"args[{key}]" if isinstance(key, int) else f"kwargs[{key!r}]"


def check_ranks(ranks: Any, nprocs: int) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(nprocs))
    found = set()
    for rank in ranks if isinstance(ranks, Iterable) and not isinstance(ranks, str) else [ranks]:
        if isinstance(rank, bool) or not isinstance(rank, SupportsIndex):  # which numpy's integers are, too
            raise TypeError(f"ranks must be a rank or several ranks, such as 0 or [0, 2], not {ranks!r}")
        if not 0 <= index(rank) < nprocs:
            raise ValueError(f"ranks={ranks!r} has {rank}, but the ranks are 0 to {nprocs - 1}")
        found.add(index(rank))
    if not found:
        raise ValueError("ranks is empty; leave it out to call all ranks")
    return tuple(sorted(found))


def spread_per_rank(
    args: Sequence[Any], kwargs: Mapping[str, Any], ranks: tuple[int, ...], nprocs: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments in which each PerRank has a value for each of `nprocs` ranks: None for those not in `ranks`. Raises
    ValueError if one has neither a value for each rank nor one for each of `ranks`.
    """
    spread: dict[int | str, PerRank[Any]] = {}
    for key, value in find_per_rank(args, kwargs).items():
        count = len(value.values)
        if count not in (len(ranks), nprocs):
            called = f", of which {len(ranks)} are called" if len(ranks) < nprocs else ""
            raise ValueError(f"{_compare(key, count, nprocs)}{called}")
        by_rank = dict(zip(range(nprocs) if count == nprocs else ranks, value.values, strict=True))
        spread[key] = PerRank([by_rank[rank] if rank in ranks and rank in by_rank else None for rank in range(nprocs)])
    return (
        tuple(spread.get(position, value) for position, value in enumerate(args)),
        {name: spread.get(name, value) for name, value in kwargs.items()},
    )


def check_per_rank(args: Iterable[Any], kwargs: Mapping[str, Any], nprocs: int) -> None:
    for key, value in find_per_rank(args, kwargs).items():
        if len(value.values) != nprocs:
            raise ValueError(_compare(key, len(value.values), nprocs))


def _compare(key: int | str, count: int, nprocs: int) -> str:
    values = f"{format_argument(key)} is a PerRank of {format_count(count, 'value')}"
    return f"{values}, but there is 1 rank" if nprocs == 1 else f"{values}, but there are {nprocs} ranks"
