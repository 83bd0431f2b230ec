"""Compares the collectives of all ranks, and decides which ranks differ from the others. Pure.

torch's flight recorder numbers the collectives of each process group. Number N must be the same call on all ranks. If not:

- MISMATCH: ranks made different calls as number N, and one of them waits in it. Normally it cannot succeed.
- ABSENT: ranks wait in a collective that another rank has not called. If its function still runs, it may do so later.
- CROSSED: ranks wait for one another in different collectives, perhaps not for ever if one of the calls was asynchronous.

ABSENT blames the absent ranks, the others the minority, or nobody if it is not certain who that is. A program may have
several torch worlds (default process groups), with numbers of their own for the ranks; if two ranks have one number in a
world, there is no verdict on it. torch's own comparison (torch.distributed.flight_recorder) takes the call of the first rank
as correct.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from mpwatch.results.collective import DEFAULT_GROUP, Collective, CollectiveState
from mpwatch.results.failure import format_ranks
from mpwatch.results.rank_collectives import RankCollectives

# Operations whose input (or output) tensors must have the same types and numbers of elements on all ranks. Shapes may
# differ, since a collective does not see them. In other operations, the tensors may differ. The flight recorder uses these
# names for gloo and NCCL.
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
    MISMATCH = auto()
    ABSENT = auto()
    CROSSED = auto()


class Group(NamedTuple):
    """A process group with one of its backends: equal for all of its ranks."""

    name: str
    backend: str
    ranks: tuple[int, ...]  # the global ranks of torch in the world of the process group
    number: int = 1  # the number of this process group among those with the same name in its world
    world: str = ""


Finding = tuple[VerdictKind, Group, int]  # what does not fit in which collective
Key = tuple[int, int]  # of a collective: index of the group in a _GroupTable, number of the collective
Signature = tuple[object, ...]  # two calls with different signatures do not fit
Reader = Callable[[Collective], Signature | None]  # reads a signature; None: it is not known


@dataclass(frozen=True)
class CollectiveVerdict:
    """A verdict on ranks whose collectives do not fit together.

    Attributes:
        blamed: empty if it is not certain which ranks are to blame.
        evidence: for each blamed rank, a phrase that follows the rank's name.
        seconds: how long the first rank has waited in the collective.
        have_returned: whether the ranks to blame have returned.
        is_blocking: whether the main thread of a rank certainly waits in the collective.
        is_complete: whether it is known what each rank waits for. Else the cause may be a rank that has not answered, or one
            in send or recv.
    """

    kind: VerdictKind
    blamed: tuple[int, ...]
    sentence: str = field(compare=False)
    evidence: Mapping[int, str] = field(compare=False)
    group: Group
    sequence: int
    seconds: float = field(default=0.0, compare=False)
    have_returned: bool = False
    is_blocking: bool = field(default=False, compare=False)
    is_complete: bool = True

    @property
    def finding(self) -> Finding:
        """What does not fit. Two verdicts with the same finding can blame different ranks."""
        return self.kind, self.group, self.sequence

    @property
    def cannot_end_well(self) -> bool:
        """Whether the collective cannot succeed any more, for example because an absent rank has returned."""
        return self.kind is VerdictKind.MISMATCH or self.have_returned


def find_verdict(answers: Mapping[int, RankCollectives], returned: Iterable[int] = ()) -> CollectiveVerdict | None:
    """Return the first verdict of `find_verdicts`, if any."""
    return next(iter(find_verdicts(answers, returned)), None)


def find_verdicts(answers: Mapping[int, RankCollectives], returned: Iterable[int] = ()) -> list[CollectiveVerdict]:
    """Return all verdicts, the most certain first: MISMATCH, ABSENT (first of ranks that have returned), CROSSED.

    Args:
        answers: by mpwatch's global ranks. Only these ranks can be blamed.
        returned: ranks whose function has returned.
    """
    worlds = _find_members(answers)
    groups = _GroupTable(worlds)
    calls = {rank: _RankCalls(answers[rank], groups) for rank in sorted(answers) if answers[rank].world in worlds}
    return [*_find_mismatch(groups, calls), *_find_absent(groups, answers, calls, set(returned))]


def get_current_collective(answer: RankCollectives) -> Collective | None:
    """Return the collective in which the rank waits, or else its last one, if any."""
    return next(filter(_is_waiting, answer.collectives), answer.collectives[-1] if answer.collectives else None)


def format_stall_warning(verdict: CollectiveVerdict, answers: Mapping[int, RankCollectives], seconds: float) -> str:
    places = [f"rank {rank} is at {answers[rank].place}" for rank in verdict.blamed if answers[rank].place]
    return "; ".join([f"ranks have waited for {seconds:.0f} s in a collective: {verdict.sentence}", *places])


def _find_members(answers: Mapping[int, RankCollectives]) -> dict[str, dict[int, int]]:
    """Return, for each torch world, mpwatch's rank numbers by torch's."""
    worlds: dict[str, dict[int, int]] = {}
    ambiguous = set()
    for rank, answer in answers.items():
        if answer.rank_in_world is not None:
            members = worlds.setdefault(answer.world, {})
            if members.setdefault(answer.rank_in_world, rank) != rank:
                ambiguous.add(answer.world)
    return {world: members for world, members in worlds.items() if world not in ambiguous}


def select_new_stalls(stalls: Iterable[CollectiveVerdict], warned: set[Finding]) -> list[CollectiveVerdict]:
    """Return the verdicts to log as warnings, and add their findings to `warned`.

    One warning is enough for the same ranks: rank 0 may wait for rank 2 in one process group, and rank 1 in another.
    """
    stalls = list(stalls)
    named = {rank for stall in stalls if stall.finding in warned for rank in stall.blamed}
    new = []
    for stall in stalls:
        if stall.finding not in warned and not (stall.blamed and named.issuperset(stall.blamed)):
            new.append(stall)
            warned.add(stall.finding)
            named.update(stall.blamed)
    return new


class _GroupTable:
    """Numbers the process groups, since a number is faster to compare and hash than a Group with all its ranks.

    `worlds` has mpwatch's ranks by torch's ranks, for each world.
    """

    def __init__(self, worlds: Mapping[str, Mapping[int, int]]) -> None:
        self.groups: list[Group] = []
        self._worlds = worlds
        self._members: list[list[int]] = []  # by index of the group: the ranks that have answered
        self._index: dict[Group, int] = {}
        self._index_by_id: dict[tuple[object, ...], int] = {}  # the calls keep the tuples of ranks alive

    def get_key(self, call: Collective, world: str) -> Key:
        by_id = call.group, call.backend, id(call.ranks), call.group_number, world
        index = self._index_by_id.get(by_id)
        if index is None:
            group = Group(call.group, call.backend, call.ranks, call.group_number, world)
            index = self._index_by_id[by_id] = self._index.setdefault(group, len(self.groups))
            if index == len(self.groups):
                self.groups.append(group)
                members = self._worlds[world]
                self._members.append([members[rank] for rank in call.ranks if rank in members])
        return index, call.sequence

    def get_members(self, key: Key) -> list[int]:
        return self._members[key[0]]

    def count_unknown(self, key: Key) -> int:
        return len(self.groups[key[0]].ranks) - len(self._members[key[0]])

    def get_order(self, key: Key) -> tuple[int, Group]:
        return key[1], self.groups[key[0]]


class _RankCalls:
    """The collectives that one rank has called, oldest first."""

    def __init__(self, answer: RankCollectives, groups: _GroupTable) -> None:
        self.by_key: dict[Key, Collective] = {}
        self.last_numbers: dict[int, int] = {}  # by index of the group
        for call in answer.collectives:
            if call.ranks and call.name not in POINT_TO_POINT:
                key = groups.get_key(call, answer.world)
                self.by_key.pop(key, None)
                self.by_key[key] = call
                self.last_numbers[key[0]] = max(key[1], self.last_numbers.get(key[0], 0))

    @property
    def last(self) -> Collective | None:
        return next(reversed(self.by_key.values()), None)

    def has_not_called(self, key: Key, *, has_all: bool) -> bool:
        """Return whether that is certain."""
        number = self.last_numbers.get(key[0])
        return has_all if number is None else number < key[1]


def _is_waiting(call: Collective) -> bool:
    return call.state is CollectiveState.WAITING


# --- Mismatch ---


def _find_mismatch(groups: _GroupTable, calls: Mapping[int, _RankCalls]) -> list[CollectiveVerdict]:
    """Return a MISMATCH verdict on the first collective in which the calls of the ranks differ, if any."""
    by_key: dict[Key, dict[int, Collective]] = {}
    for rank, of_rank in calls.items():
        for key, call in of_rank.by_key.items():
            by_key.setdefault(key, {})[rank] = call
    for key in sorted(by_key, key=groups.get_order):
        called = by_key[key]
        if any(map(_is_waiting, called.values())) and (camps := _find_camps(called)):
            return [_make_mismatch(groups, key, called, camps)]
    return []


def _find_camps(called: Mapping[int, Collective]) -> list[list[int]]:
    """Return the camps of ranks that made the same call, the largest first. One camp alone is none."""
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
        return *call.input_dtypes, *map(math.prod, call.input_shapes)
    if call.name in SAME_OUTPUTS:
        return *call.output_dtypes, *map(math.prod, call.output_shapes)
    return None


def _read_reduction(call: Collective) -> Signature | None:
    return (call.reduce_op,) if call.reduce_op else None


def _read_root(call: Collective) -> Signature | None:
    return None if call.root is None else (call.root,)


DIFFERENCES: tuple[Reader, ...] = (_read_operation, _read_tensors, _read_reduction, _read_root)


def _make_mismatch(
    groups: _GroupTable, key: Key, called: Mapping[int, Collective], camps: list[list[int]]
) -> CollectiveVerdict:
    group = groups.groups[key[0]]
    # ranks that have not called it yet, that have not answered, or of which it is not known what they have called
    unknown = len(group.ranks) - sum(map(len, camps))
    has_majority = len(camps[0]) > len(camps[1]) + unknown
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
        group,
        key[1],
        max(call.seconds for call in called.values()),
    )


def _format_camps(called: Mapping[int, Collective], camps: list[list[int]], read: Reader) -> str:
    """Return a phrase that says what the ranks of each camp have called, as it follows the ranks of `camps[0]`."""
    parts = []
    for camp in camps:
        call, is_first = called[camp[0]], camp is camps[0]
        who = "called" if is_first else format_ranks(camp)
        group = "" if call.group == DEFAULT_GROUP else f" of {call.group_title}"
        title = f"{call.title}{group} " if is_first or read is _read_operation else ""
        parts.append(f"{who} {title}with {_format_difference(call, read)}{_format_place(call)}")
    return ", ".join(parts)


def _format_difference(call: Collective, read: Reader) -> str:
    if read is _read_reduction:
        return f"op {call.reduce_op}"
    if read is _read_root:
        return f"root {call.root}"
    return call.tensors or "no tensor"


def _format_place(call: Collective) -> str:
    return f" ({call.place})" if call.place else ""


# --- Absent ranks ---


def _find_absent(
    groups: _GroupTable, answers: Mapping[int, RankCollectives], calls: Mapping[int, _RankCalls], returned: set[int]
) -> list[CollectiveVerdict]:
    """Return the ABSENT verdicts, and then the CROSSED verdict, if any."""
    waiting: dict[Key, list[int]] = {}
    for rank, of_rank in calls.items():
        key = next((key for key, call in of_rank.by_key.items() if _is_waiting(call)), None)
        if key is not None:
            waiting.setdefault(key, []).append(rank)
    absent_from: dict[Key, set[int]] = {}
    for key in sorted(waiting, key=groups.get_order):
        members = groups.get_members(key)
        if absent := {rank for rank in members if calls[rank].has_not_called(key, has_all=answers[rank].has_all)}:
            absent_from[key] = absent
    blocked = {rank: call for rank, answer in answers.items() if (call := _find_block(answer)) is not None}
    verdicts, crossed = [], []
    for key, absent in absent_from.items():
        if to_blame := absent & returned or absent - blocked.keys():
            have_returned = to_blame <= returned
            verdicts.append(_make_absent(groups, key, waiting[key], calls, sorted(to_blame), have_returned=have_returned))
        else:
            crossed.append(key)
    verdicts.sort(key=lambda verdict: (not verdict.have_returned, -verdict.seconds))
    if closed := _find_closed(crossed, waiting, absent_from) or (crossed if not verdicts else []):
        verdicts.append(_make_crossed(groups, calls, {key: waiting[key] for key in closed}, absent_from, blocked))
    return verdicts


def _find_closed(keys: list[Key], waiting: Mapping[Key, list[int]], absent_from: Mapping[Key, set[int]]) -> list[Key]:
    """Select the collectives in which ranks wait for one another: each absent rank waits in another of them."""
    while True:
        in_keys = {rank for key in keys for rank in waiting[key]}
        closed = [key for key in keys if absent_from[key] <= in_keys]
        if len(closed) == len(keys):
            return closed
        keys = closed


def _find_block(answer: RankCollectives) -> Collective | None:
    """Return a call in which the rank waits, also `recv` and the like. Prefer one whose source line is known."""
    pending = [call for call in answer.collectives if _is_waiting(call)]
    return next((call for call in pending if call.place), pending[0] if pending else None)


def _make_absent(
    groups: _GroupTable,
    key: Key,
    waiting: list[int],
    calls: Mapping[int, _RankCalls],
    absent: list[int],
    *,
    have_returned: bool,
) -> CollectiveVerdict:
    call = calls[waiting[0]].by_key[key]
    where = f"{call.title} ({', '.join(filter(None, (call.tensors, call.group_title)))})"
    wait = _format_wait(waiting)
    evidence = {}
    for rank in absent:
        last = calls[rank].last
        history = f"its last collective was {last.title}{_format_place(last)}" if last else "it has called no collective"
        if have_returned:
            evidence[rank] = f"has returned, but {wait} for it in {where}{_format_place(call)}; {history}"
        else:
            evidence[rank] = f"has not joined {where}, in which {wait}{_format_place(call)}; {history}"
    return CollectiveVerdict(
        VerdictKind.ABSENT,
        tuple(absent),
        "; ".join(f"rank {rank} {evidence[rank]}" for rank in absent),
        evidence,
        groups.groups[key[0]],
        key[1],
        max(calls[rank].by_key[key].seconds for rank in waiting),
        have_returned=have_returned,
        is_blocking=any(calls[rank].by_key[key].place for rank in waiting),
    )


def _format_wait(ranks: list[int]) -> str:
    return f"{format_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _make_crossed(
    groups: _GroupTable,
    calls: Mapping[int, _RankCalls],
    waiting: Mapping[Key, list[int]],
    absent_from: Mapping[Key, set[int]],
    blocked: Mapping[int, Collective],
) -> CollectiveVerdict:
    """Blame nobody if the cause may be a rank that is not in `waiting`."""
    first, *others = sorted(waiting, key=lambda key: (-len(waiting[key]), groups.get_order(key)))
    in_collectives = {rank for ranks in waiting.values() for rank in ranks}
    is_complete = all(absent_from[key] <= in_collectives and not groups.count_unknown(key) for key in waiting)
    has_majority = is_complete and all(len(waiting[first]) > len(waiting[key]) for key in others)
    evidence = {}
    for rank in sorted(absent_from[first]):
        doing = "waits in" if blocked[rank].place else "has not completed"
        in_first = calls[waiting[first][0]].by_key[first]
        evidence[rank] = f"{doing} {blocked[rank]}, but {_format_wait(waiting[first])} for it in {in_first}"
    if has_majority or not is_complete:
        sentence = "; ".join(f"rank {rank} {text}" for rank, text in evidence.items())
    else:
        parts = [f"{_format_wait(waiting[key])} in {calls[waiting[key][0]].by_key[key]}" for key in (first, *others)]
        sentence = f"{', '.join(parts)}: they wait for one another"
    return CollectiveVerdict(
        VerdictKind.CROSSED,
        tuple(evidence) if has_majority else (),
        sentence,
        evidence if has_majority else {},
        groups.groups[first[0]],
        first[1],
        max(calls[rank].by_key[key].seconds for key, ranks in waiting.items() for rank in ranks),
        is_complete=is_complete,
    )
