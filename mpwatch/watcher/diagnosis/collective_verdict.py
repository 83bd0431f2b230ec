"""Compares the collectives of all ranks, and decides which ranks differ from the others. Pure.

torch's flight recorder numbers the collectives of each process group. In a correct program, collective number N of a process
group is the same collective on all ranks of the group. Three things can be wrong:

- MISMATCH: ranks made different calls as collective number N, and at least one of these ranks waits in its call. For
  example, collective number 5 of rank 0 is `all_reduce`, but collective number 5 of rank 1 is `broadcast`. A collective
  with a mismatch normally cannot succeed.
- ABSENT: ranks wait in a collective, and another rank of the process group has not called this collective. If the function
  of the absent rank is still running, the absent rank can call the collective later.
- CROSSED: ranks wait for one another in different collectives. If one of the calls was asynchronous, the ranks in a CROSSED
  verdict can perhaps continue.

An ABSENT verdict blames absent ranks. MISMATCH and CROSSED verdicts blame the ranks that are in the minority. If it is not
certain which ranks are in the minority, the verdict blames no rank.

A rank can have different numbers in torch and in mpwatch. For example, a program can make several torch worlds (default
process groups), or can choose its own rank numbers. Each rank reports the number that it has in its torch world. If two
ranks of a world report the same number, there is no verdict on this world. There is no verdict on process groups whose ranks
are unknown.

mpwatch does not use torch's own comparison of collectives (torch.distributed.flight_recorder), because the watcher would
have to import torch. torch's comparison always takes the call of the first rank as correct, even if most ranks made a
different call.
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
    """What is wrong with the collectives of the ranks."""

    MISMATCH = auto()
    ABSENT = auto()
    CROSSED = auto()


class Group(NamedTuple):
    """A process group together with one of its backends.

    The Group objects of all ranks of a process group are equal.
    """

    name: str
    backend: str
    ranks: tuple[int, ...]
    """The global ranks of torch in the world of the process group."""
    number: int = 1
    """The number of this process group among those with the same name in its world."""
    world: str = ""


Finding = tuple[VerdictKind, Group, int]  # what does not fit in which collective
Key = tuple[int, int]  # of a collective: index of the group in a _GroupTable, number of the collective
Signature = tuple[object, ...]  # two calls with different signatures do not fit
Reader = Callable[[Collective], Signature | None]  # reads a signature; None: it is not known


@dataclass(frozen=True)
class CollectiveVerdict:
    """A verdict on ranks whose collectives do not fit together, and the text of this verdict.

    Attributes:
        kind: in which way the collectives do not fit together.
        blamed: the ranks to blame, or an empty tuple if it is not certain which ranks are to blame.
        sentence: the verdict as a sentence.
        evidence: for each blamed rank, a phrase that follows the rank's name.
        group: the process group of the collective.
        sequence: the number of the collective in its group.
        seconds: how long the first rank has waited in the collective.
        have_returned: whether the ranks to blame have returned.
        is_blocking: whether the main thread of a rank certainly waits in the collective.
        is_complete: whether it is known what each of these ranks waits for. If not, the cause may be a rank that has not
            answered, or a rank that waits in send or recv.
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
        """A tuple: the kind of the verdict, the process group, and the number of the collective.

        Two verdicts with the same finding can blame different ranks.
        """
        return self.kind, self.group, self.sequence

    @property
    def cannot_end_well(self) -> bool:
        """True if the collective cannot succeed any more, for example because an absent rank has already returned."""
        return self.kind is VerdictKind.MISMATCH or self.have_returned


def find_verdict(answers: Mapping[int, RankCollectives], returned: Iterable[int] = ()) -> CollectiveVerdict | None:
    """Return the first verdict of `find_verdicts`, or None if there is no verdict."""
    return next(iter(find_verdicts(answers, returned)), None)


def find_verdicts(answers: Mapping[int, RankCollectives], returned: Iterable[int] = ()) -> list[CollectiveVerdict]:
    """Return all verdicts, the most certain verdict first.

    The order of the verdicts is MISMATCH, ABSENT, CROSSED. If an ABSENT verdict blames ranks that have returned, it comes
    before the other ABSENT verdicts.

    Args:
        answers: a dict from mpwatch's global rank to the rank's answer. A verdict blames only ranks in this dict.
        returned: ranks whose function has returned.
    """
    worlds = _find_members(answers)
    groups = _GroupTable(worlds)
    calls = {rank: _index_calls(answers[rank], groups) for rank in sorted(answers) if answers[rank].world in worlds}
    mismatch = _find_mismatch(groups, calls)
    others = _find_absent(groups, answers, calls, set(returned))
    return [*filter(None, [mismatch]), *others]


def get_current_collective(answer: RankCollectives) -> Collective | None:
    """Return the collective in which the rank waits. If the rank does not wait, return its last collective.

    If the rank has called no collective, return None.
    """
    return next(filter(_is_waiting, answer.collectives), answer.collectives[-1] if answer.collectives else None)


def format_stall_warning(verdict: CollectiveVerdict, answers: Mapping[int, RankCollectives], seconds: float) -> str:
    """Return a warning that says how long ranks have waited in a collective, and where the late ranks are."""
    places = [f"rank {rank} is at {answers[rank].place}" for rank in verdict.blamed if answers[rank].place]
    return "; ".join([f"ranks have waited for {seconds:.0f} s in a collective: {verdict.sentence}", *places])


def _find_members(answers: Mapping[int, RankCollectives]) -> dict[str, dict[int, int]]:
    """Return, for each torch world, a dict from torch's rank numbers to mpwatch's rank numbers."""
    worlds: dict[str, dict[int, int]] = {}
    ambiguous = set()
    for rank, answer in answers.items():
        if answer.rank_in_world is not None:
            members = worlds.setdefault(answer.world, {})
            if members.setdefault(answer.rank_in_world, rank) != rank:
                ambiguous.add(answer.world)
    return {world: members for world, members in worlds.items() if world not in ambiguous}


def select_new_stalls(stalls: Iterable[CollectiveVerdict], warned: set[Finding]) -> list[CollectiveVerdict]:
    """Return the verdicts to log as warnings, and add the findings of these verdicts to `warned`.

    If several verdicts of `stalls` blame the same ranks, only one of these verdicts needs a warning. For example, rank 0 can
    wait for rank 2 in one process group, while rank 1 waits for rank 2 in another process group.
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
    """A table that gives a number to each process group. A number is faster to compare and hash than a Group object.

    Args:
        worlds: for each world, a dict from torch's ranks to mpwatch's ranks.
    """

    def __init__(self, worlds: Mapping[str, Mapping[int, int]]) -> None:
        self.groups: list[Group] = []
        self._worlds = worlds
        self._members: list[list[int]] = []  # by index of the group: the ranks that have answered
        self._index: dict[Group, int] = {}
        self._index_by_id: dict[tuple[object, ...], int] = {}  # the calls keep the tuples of ranks alive

    def get_key(self, call: Collective, world: str) -> Key:
        """Return the key of a collective: the index of its process group, and its number in this group."""
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
        """Return the ranks of the process group that have reported their collectives.

        The returned numbers are mpwatch's global ranks.
        """
        return self._members[key[0]]

    def count_unknown(self, key: Key) -> int:
        """Return how many ranks of the process group have not reported their collectives."""
        return len(self.groups[key[0]].ranks) - len(self._members[key[0]])

    def get_order(self, key: Key) -> tuple[int, Group]:
        """Return a sort key that puts the collective with the lowest number first."""
        return key[1], self.groups[key[0]]


class _RankCalls:
    """The collectives that one rank has called (oldest first), and the highest collective number in each process group."""

    def __init__(self) -> None:
        self.by_key: dict[Key, Collective] = {}
        self.last_numbers: dict[int, int] = {}

    def add(self, key: Key, call: Collective) -> None:
        self.by_key.pop(key, None)
        self.by_key[key] = call
        self.last_numbers[key[0]] = max(key[1], self.last_numbers.get(key[0], 0))

    @property
    def last(self) -> Collective | None:
        return next(reversed(self.by_key.values()), None)

    def has_not_called(self, key: Key, *, has_all: bool) -> bool:
        """Return True if it is certain that the rank has not called the collective."""
        number = self.last_numbers.get(key[0])
        return has_all if number is None else number < key[1]


def _index_calls(answer: RankCollectives, groups: _GroupTable) -> _RankCalls:
    calls = _RankCalls()
    for call in answer.collectives:
        if call.ranks and call.name not in POINT_TO_POINT:
            calls.add(groups.get_key(call, answer.world), call)
    return calls


def _is_waiting(call: Collective) -> bool:
    return call.state is CollectiveState.WAITING


# --- Mismatch ---


def _find_mismatch(groups: _GroupTable, calls: Mapping[int, _RankCalls]) -> CollectiveVerdict | None:
    """Return a MISMATCH verdict on the first collective in which the calls of the ranks differ, or None."""
    by_key: dict[Key, dict[int, Collective]] = {}
    for rank, of_rank in calls.items():
        for key, call in of_rank.by_key.items():
            by_key.setdefault(key, {})[rank] = call
    for key in sorted(by_key, key=groups.get_order):
        called = by_key[key]
        if any(map(_is_waiting, called.values())) and (camps := _find_camps(called)):
            return _make_mismatch(groups, key, called, camps)
    return None


def _find_camps(called: Mapping[int, Collective]) -> list[list[int]]:
    """Return the camps, the largest camp first. A camp is a group of ranks that made the same call.

    Return an empty list if all calls are the same.
    """
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
    """Return a phrase that says what the ranks of each camp have called.

    The phrase begins with "called". The caller puts the ranks of `camps[0]` before the phrase, as in "rank 2 called ...".
    """
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
    groups: _GroupTable, answers: Mapping[int, RankCollectives], calls: Mapping[int, _RankCalls], returned: set[int]
) -> list[CollectiveVerdict]:
    """Return the ABSENT verdicts, and then the CROSSED verdict, if there is one."""
    waiting: dict[Key, list[int]] = {}
    for rank, of_rank in calls.items():
        key = next((key for key, call in of_rank.by_key.items() if _is_waiting(call)), None)
        if key is not None:
            waiting.setdefault(key, []).append(rank)
    absent_from: dict[Key, set[int]] = {}
    for key in sorted(waiting, key=groups.get_order):
        in_group = groups.get_members(key)
        absent = {rank for rank in in_group if calls[rank].has_not_called(key, has_all=answers[rank].has_all)}
        if absent:
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
    """Select from `keys` the collectives in which ranks wait for one another.

    If a rank has not called one of the selected collectives, this rank waits in another selected collective. For example,
    select A and B if rank 0 waits in A and has not called B, and rank 1 waits in B and has not called A.
    """
    while True:
        in_keys = {rank for key in keys for rank in waiting[key]}
        closed = [key for key in keys if absent_from[key] <= in_keys]
        if len(closed) == len(keys):
            return closed
        keys = closed


def _find_block(answer: RankCollectives) -> Collective | None:
    """Return a call in which the rank waits, such as `all_reduce` or `recv`. Return None if the rank waits in no call.

    If the rank waits in several calls, prefer a call whose source line is known.
    """
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
    """Return the verdict on ranks that wait for one another. The ranks wait in different collectives, or in send or recv.

    If the cause may be a rank that is not in `waiting`, the verdict blames no rank.
    """
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
