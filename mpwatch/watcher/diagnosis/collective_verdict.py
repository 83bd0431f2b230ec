"""Decides which rank does not fit, from the collectives that all ranks have called. Pure.

torch's flight recorder numbers the collectives of each process group. Ranks that work together call the same collective with
the same number. Three things can be wrong:

- MISMATCH: two ranks called different things with the same number, and at least one of them waits in it. This can never end
  well.
- ABSENT: ranks wait in a collective, and another rank of its group has not called it. It may still do so, unless it has
  returned.
- CROSSED: ranks wait in different collectives for one another. They may still go on if a call was asynchronous.

The minority is blamed. If it is not certain which one that is, all ranks that differ are named and nobody is blamed.

torch compares dumps of the flight recorder, too (torch.distributed.flight_recorder). It needs torch in the process that
compares, takes the first rank for the right one, and calls reshaped tensors a mismatch. So the comparison here is mpwatch's
own; a test holds it against torch's.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from mpwatch.results.collective import DEFAULT_GROUP, Collective, CollectiveState
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.results.report import format_ranks

# Operations whose tensors must have the same types and numbers of elements on all ranks: those of the inputs, or of the
# outputs. Shapes may differ: a collective does not see them. Elsewhere the ranks may differ. The names are those of gloo and
# NCCL in the flight recorder.
SAME_INPUTS = {
    "all_reduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "gather",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
}
SAME_OUTPUTS = {"scatter", "all_gather", "_all_gather_base", "all_gather_into_tensor_coalesced", "allgather_coalesced"}
POINT_TO_POINT = {"send", "recv", "batch_isend_irecv"}


class VerdictKind(Enum):
    """What does not fit."""

    MISMATCH = auto()
    ABSENT = auto()
    CROSSED = auto()


Key = tuple[str, str, tuple[int, ...], int]  # group, backend, the group's ranks, number of the collective
Signature = tuple[object, ...]  # two calls with different signatures do not fit
Reader = Callable[[Collective], Signature | None]  # reads a signature; None: it is not known


@dataclass(frozen=True)
class CollectiveVerdict:
    """Which ranks do not fit, and the words for it.

    Attributes:
        kind: what does not fit.
        blamed: the ranks to blame. Empty if that is not certain.
        sentence: the verdict in words.
        evidence: for each blamed rank, a phrase that follows the rank's name.
        key: identifies the collective. Two verdicts with the same kind, key and blamed ranks are the same finding.
        seconds: how long the first rank has waited in the collective.
        have_returned: whether all ranks to blame have returned.
    """

    kind: VerdictKind
    blamed: tuple[int, ...]
    sentence: str = field(compare=False)
    evidence: Mapping[int, str] = field(compare=False)
    key: Key
    seconds: float = field(default=0.0, compare=False)
    have_returned: bool = False


def find_verdict(answers: Mapping[int, RankCollectives], returned: Iterable[int] = ()) -> CollectiveVerdict | None:
    """Return what does not fit, or None.

    Args:
        answers: what the ranks have answered, by global rank. Ranks that have not answered are missing: nothing is said of
            them.
        returned: ranks whose function has returned.
    """
    groups = {(call.group, call.ranks) for answer in answers.values() for call in answer.collectives if call.ranks}
    calls = {rank: _index_calls(rank, answer, groups) for rank, answer in answers.items()}
    return _find_mismatch(calls) or _find_absent(answers, calls, set(returned))


def get_current_collective(answer: RankCollectives) -> Collective | None:
    """Return the collective in which the rank waits, or else its last one. None: it has called none."""
    return next(filter(_is_waiting, answer.collectives), answer.collectives[-1] if answer.collectives else None)


def format_stall_warning(verdict: CollectiveVerdict, answers: Mapping[int, RankCollectives]) -> str:
    """Return the warning that ranks wait for others, and where these are."""
    places = [f"rank {rank} is at {answers[rank].place}" for rank in verdict.blamed if answers[rank].place]
    return "; ".join([f"ranks have waited for {verdict.seconds:.0f} s in a collective: {verdict.sentence}", *places])


def _index_calls(rank: int, answer: RankCollectives, groups: set[tuple[str, tuple[int, ...]]]) -> dict[Key, Collective]:
    """Return the calls of a rank by their keys.

    A rank that has destroyed its process group no longer knows the group's ranks. The other ranks may know them.
    """
    calls = [call for call in answer.collectives if call.name not in POINT_TO_POINT]
    ranks = {group: ranks for group, ranks in groups if rank in ranks}
    calls = [call if call.ranks else replace(call, ranks=ranks.get(call.group, ())) for call in calls]
    return {_get_key(call): call for call in calls}


def _get_key(call: Collective) -> Key:
    return call.group, call.backend, call.ranks, call.sequence


def _is_waiting(call: Collective) -> bool:
    return call.state is CollectiveState.WAITING


# --- Mismatch ---


def _find_mismatch(calls: Mapping[int, Mapping[Key, Collective]]) -> CollectiveVerdict | None:
    """Return the first collective that ranks have called differently."""
    by_key: dict[Key, dict[int, Collective]] = {}
    for rank, calls_of_rank in sorted(calls.items()):
        for key, call in calls_of_rank.items():
            by_key.setdefault(key, {})[rank] = call
    for key in sorted(by_key, key=lambda key: (key[-1], key)):
        called = by_key[key]
        if any(map(_is_waiting, called.values())) and (camps := _find_camps(called)):
            return _make_mismatch(key, called, camps)
    return None


def _find_camps(called: Mapping[int, Collective]) -> list[list[int]]:
    """Return the ranks that have called the same, the largest group first. Empty if all have called the same."""
    for read in DIFFERENCES:
        camps: dict[Signature, list[int]] = {}
        for rank, call in called.items():
            if (signature := read(call)) is not None:
                camps.setdefault(signature, []).append(rank)
        if len(camps) > 1:
            return sorted(camps.values(), key=lambda ranks: (-len(ranks), ranks))
    return []


def _read_operation(call: Collective) -> Signature:
    return (call.name,)


def _read_tensors(call: Collective) -> Signature | None:
    if call.name in SAME_INPUTS:
        return *call.input_dtypes, *map(_count_elements, call.input_shapes)
    if call.name in SAME_OUTPUTS:
        return *call.output_dtypes, *map(_count_elements, call.output_shapes)
    return None


def _count_elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _read_reduction(call: Collective) -> Signature | None:
    return (call.reduce_op,) if call.reduce_op else None


def _read_root(call: Collective) -> Signature | None:
    return None if call.root is None else (call.root,)


DIFFERENCES: tuple[Reader, ...] = (_read_operation, _read_tensors, _read_reduction, _read_root)


def _make_mismatch(key: Key, called: Mapping[int, Collective], camps: list[list[int]]) -> CollectiveVerdict:
    unknown = set(key[2]) - called.keys()  # ranks that have not called it yet, or have not answered
    has_majority = len(camps[0]) > len(camps[1]) + len(unknown)
    read = next(read for read in DIFFERENCES if len({read(called[camp[0]]) for camp in camps}) > 1)
    phrases = {
        rank: _format_camps(called, [camp, *(other for other in camps if other is not camp)], read)
        for camp in camps
        for rank in camp
    }
    blamed = camps[1:] if has_majority else []
    return CollectiveVerdict(
        VerdictKind.MISMATCH,
        tuple(sorted(rank for camp in blamed for rank in camp)),
        "; ".join(f"{format_ranks(camp)} {phrases[camp[0]]}" for camp in blamed or camps[:1]),
        {rank: phrases[rank] for camp in blamed for rank in camp},
        key,
        max(call.seconds for call in called.values()),
    )


def _format_camps(called: Mapping[int, Collective], camps: list[list[int]], read: Reader) -> str:
    """Return a phrase that follows the ranks of the first camp: what they have called, and what the other ranks have."""
    parts = []
    for camp in camps:
        call = called[camp[0]]
        is_first = camp is camps[0]
        who = "called" if is_first else format_ranks(camp)
        title = f"{call.title}{_format_group(call)} " if is_first or read is _read_operation else ""
        parts.append(f"{who} {title}with {_format_difference(call, read)}{_format_place(call)}")
    return ", ".join(parts)


def _format_difference(call: Collective, read: Reader) -> str:
    if read is _read_reduction:
        return f"op {call.reduce_op}"
    if read is _read_root:
        return f"root {call.root}"
    return call.tensors or "no tensor"


def _format_group(call: Collective) -> str:
    return "" if call.group == DEFAULT_GROUP else f" of {call.group_title}"


def _format_place(call: Collective) -> str:
    return f" ({call.place})" if call.place else ""


# --- Absent ranks ---


def _find_absent(
    answers: Mapping[int, RankCollectives], calls: Mapping[int, Mapping[Key, Collective]], returned: set[int]
) -> CollectiveVerdict | None:
    """Return the first collective in which ranks wait for a rank that is not in it."""
    waits = {rank: call for rank, of_rank in calls.items() if (call := _find_wait(of_rank.values())) is not None}
    blocked = {rank: call for rank, answer in answers.items() if (call := _find_wait(answer.collectives)) is not None}
    absent_from: dict[Key, set[int]] = {}
    for call in waits.values():
        absent = {rank for rank in call.ranks if rank in calls and _is_absent(answers[rank], calls[rank], call)}
        if absent:
            absent_from[_get_key(call)] = absent
    for key in sorted(absent_from, key=lambda key: (key[-1], key)):
        if free := absent_from[key] - blocked.keys():
            return _make_absent(key, waits, calls, sorted(free), returned)
    return _make_crossed(absent_from, waits, blocked) if absent_from else None


def _find_wait(calls: Iterable[Collective]) -> Collective | None:
    return next(filter(_is_waiting, calls), None)


def _is_absent(answer: RankCollectives, calls_of_rank: Mapping[Key, Collective], call: Collective) -> bool:
    """Return whether this rank has certainly not called the collective."""
    numbers = [key[-1] for key in calls_of_rank if key[:-1] == _get_key(call)[:-1]]
    return max(numbers) < call.sequence if numbers else answer.has_all


def _make_absent(
    key: Key,
    waits: Mapping[int, Collective],
    calls: Mapping[int, Mapping[Key, Collective]],
    absent: list[int],
    returned: set[int],
) -> CollectiveVerdict:
    waiting = [rank for rank, call in waits.items() if _get_key(call) == key]
    call = waits[waiting[0]]
    where = f"{call.title} ({', '.join(filter(None, (call.tensors, call.group_title)))})"
    wait = _format_wait(waiting)
    evidence = {}
    for rank in absent:
        last = next(iter([*calls[rank].values()][-1:]), None)
        history = f"its last collective was {last.title}{_format_place(last)}" if last else "it has called no collective"
        if rank in returned:
            evidence[rank] = f"has returned, but {wait} for it in {where}{_format_place(call)}; {history}"
        else:
            evidence[rank] = f"has not joined {where}, in which {wait}{_format_place(call)}; {history}"
    return CollectiveVerdict(
        VerdictKind.ABSENT,
        tuple(absent),
        "; ".join(f"rank {rank} {evidence[rank]}" for rank in absent),
        evidence,
        key,
        max(waits[rank].seconds for rank in waiting),
        have_returned=returned.issuperset(absent),
    )


def _format_wait(ranks: list[int]) -> str:
    return f"{format_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _make_crossed(
    absent_from: Mapping[Key, set[int]], waits: Mapping[int, Collective], blocked: Mapping[int, Collective]
) -> CollectiveVerdict:
    """Return the verdict on ranks that wait for one another. `blocked` has also those that wait in send and recv."""
    camps: dict[Key, list[int]] = {}
    for rank, call in waits.items():
        if _get_key(call) in absent_from:
            camps.setdefault(_get_key(call), []).append(rank)
    keys = sorted(camps, key=lambda key: (-len(camps[key]), key))
    has_majority = len(keys) == 1 or len(camps[keys[0]]) > len(camps[keys[1]])
    absent = sorted(absent_from[keys[0]]) if has_majority else []
    evidence = {
        rank: f"waits in {blocked[rank]}, but {_format_wait(camps[keys[0]])} for it in {waits[camps[keys[0]][0]]}"
        for rank in absent
    }
    parts = [f"{_format_wait(camps[key])} in {waits[camps[key][0]]}" for key in keys]
    return CollectiveVerdict(
        VerdictKind.CROSSED,
        tuple(absent),
        "; ".join(f"rank {rank} {evidence[rank]}" for rank in absent) or f"{', '.join(parts)}: they wait for one another",
        evidence,
        keys[0],
        max(call.seconds for call in waits.values()),
    )
