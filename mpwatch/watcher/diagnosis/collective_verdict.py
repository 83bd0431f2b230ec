"""Compares the collectives of all ranks, and decides which ranks differ from the others. Pure.

torch's flight recorder numbers the collectives of each process group. Number N must be the same call on all ranks. If not:

- MISMATCH: ranks made different calls as number N, and one of them waits in it. Normally it cannot succeed.
- ABSENT: ranks wait in a collective that another rank has not called. If its function still runs, it may do so later.
- CROSSED: ranks wait for one another in different collectives, perhaps not for ever if one of the calls was asynchronous.

ABSENT blames the absent ranks, the others the minority, or nobody if it is not certain who that is. torch's own comparison
(torch.distributed.flight_recorder) takes the call of the first rank as correct.
"""

import math
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from mpwatch.results.collective import DEFAULT_GROUP, Collective, CollectiveState
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.results.texts import format_ranks

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


class Key(NamedTuple):
    """Number N of a process group with one of its backends: the same on all of its ranks."""

    number: int
    group: str
    backend: str
    ranks: tuple[int, ...]


Finding = tuple[VerdictKind, Key]  # what does not fit in which collective


@dataclass(frozen=True)
class CollectiveVerdict:
    """A verdict on ranks whose collectives do not fit together.

    `evidence` has a phrase for each blamed rank, and none if it is not certain who is to blame. `is_complete`: it is known
    what each rank waits for. Else the cause may be a rank that has not answered, or one in send or recv.
    """

    kind: VerdictKind
    key: Key
    sentence: str
    evidence: Mapping[int, str]
    seconds: float
    have_returned: bool = False
    is_complete: bool = True

    @property
    def blamed(self) -> tuple[int, ...]:
        return tuple(sorted(self.evidence))

    @property
    def finding(self) -> Finding:
        """What does not fit. Two verdicts with the same finding can blame different ranks."""
        return self.kind, self.key

    @property
    def cannot_end_well(self) -> bool:
        """Whether the collective cannot succeed any more, for example because an absent rank has returned."""
        return self.kind is VerdictKind.MISMATCH or self.have_returned

    def explains(self, failures: Iterable[tuple[bool, int | None]], *, has_timed_out: bool) -> bool:
        """Return whether it explains all failures. Of each it is known whether it is secondary, and the signal. If a rank
        `has_timed_out`, this was in a wait for a peer.

        It explains secondary failures; a MISMATCH also a death by SIGABRT, since gloo calls abort() in a rank that receives
        more bytes than expected. A rank that is only late keeps its connections open, so it explains no failure but a
        timeout.
        """
        if not (self.cannot_end_well or (self.is_complete and has_timed_out)):
            return False
        is_mismatch = self.kind is VerdictKind.MISMATCH
        return all(is_secondary or (is_mismatch and signum == signal.SIGABRT) for is_secondary, signum in failures)


def find_verdict(answers: Mapping[int, RankCollectives], returned: Iterable[int] = ()) -> CollectiveVerdict | None:
    return next(iter(find_verdicts(answers, returned)), None)


def find_verdicts(answers: Mapping[int, RankCollectives], returned: Iterable[int] = ()) -> list[CollectiveVerdict]:
    """Return all verdicts, the most certain first: MISMATCH, ABSENT (first of ranks that have returned), CROSSED."""
    calls = Calls(answers)
    return [*_find_mismatch(calls), *_find_absent(calls, answers, set(returned))]


def get_current_collective(answer: RankCollectives) -> Collective | None:
    return next(filter(is_waiting, answer.collectives), answer.collectives[-1] if answer.collectives else None)


def format_stall_warning(verdict: CollectiveVerdict, answers: Mapping[int, RankCollectives], seconds: float) -> str:
    places = [f"rank {rank} is at {answers[rank].place}" for rank in verdict.blamed if answers[rank].place]
    return "; ".join([f"ranks have waited for {seconds:.0f} s in a collective: {verdict.sentence}", *places])


def select_new_stalls(stalls: Iterable[CollectiveVerdict], warned: set[Finding]) -> list[CollectiveVerdict]:
    new = [stall for stall in stalls if stall.finding not in warned]
    warned.update(stall.finding for stall in new)
    return new


@dataclass(eq=False)
class Slot:
    """What should be the same call on all ranks."""

    key: Key
    called: dict[int, Collective] = field(default_factory=dict)  # by rank


class Calls:
    """The collectives of all ranks, sorted by numbers and process groups. None if torch numbers the ranks otherwise."""

    def __init__(self, answers: Mapping[int, RankCollectives]) -> None:
        is_numbered_alike = all(answer.torch_rank in (None, rank) for rank, answer in answers.items())
        self._answers = {
            rank: answers[rank] for rank in sorted(answers) if is_numbered_alike and answers[rank].torch_rank == rank
        }
        self.by_rank: dict[int, dict[Slot, Collective]] = {rank: {} for rank in self._answers}  # oldest first
        self._last_numbers: dict[tuple[Any, ...], dict[int, int]] = {}  # by group and rank
        slots: dict[Key, Slot] = {}
        for rank, answer in self._answers.items():
            for call in answer.collectives:
                if call.ranks and call.name not in POINT_TO_POINT:
                    key = Key(call.sequence, call.group, call.backend, call.ranks)
                    slot = slots.setdefault(key, Slot(key))
                    self.by_rank[rank][slot] = slot.called[rank] = call
                    last_numbers = self._last_numbers.setdefault(key[1:], {})
                    last_numbers[rank] = max(call.sequence, last_numbers.get(rank, 0))
        self.slots = sorted(slots.values(), key=lambda slot: slot.key)

    def find_absent(self, slot: Slot) -> set[int]:
        """Return the ranks that have certainly not called it."""
        last_numbers = self._last_numbers[slot.key[1:]]

        def is_absent(rank: int) -> bool:
            return last_numbers[rank] < slot.key.number if rank in last_numbers else self._answers[rank].has_all

        return set(filter(is_absent, self._answers.keys() & slot.key.ranks))

    def knows_all(self, slot: Slot) -> bool:
        return self._answers.keys() >= set(slot.key.ranks)


def is_waiting(call: Collective) -> bool:
    return call.state is CollectiveState.WAITING


# --- Mismatch ---


class Property(NamedTuple):
    """What must be the same in all calls of a collective. `read` returns None if it is not known."""

    read: Callable[[Collective], object]
    describe: Callable[[Collective], str]


def _read_tensors(call: Collective) -> object:
    if call.name in SAME_INPUTS:
        return call.input_dtypes, *map(math.prod, call.input_shapes)
    if call.name in SAME_OUTPUTS:
        return call.output_dtypes, *map(math.prod, call.output_shapes)
    return None


def _describe_tensors(call: Collective) -> str:
    return call.tensors or "no tensor"


OPERATION = Property(lambda call: call.name, _describe_tensors)
PROPERTIES = (
    OPERATION,
    Property(_read_tensors, _describe_tensors),
    Property(lambda call: call.reduce_op or None, lambda call: f"op {call.reduce_op}"),
    Property(lambda call: call.root, lambda call: f"root {call.root}"),
)


def _find_mismatch(calls: Calls) -> list[CollectiveVerdict]:
    for slot in calls.slots:
        if any(map(is_waiting, slot.called.values())):
            for differing in PROPERTIES:
                camps: dict[object, list[int]] = {}  # of ranks that made the same call
                for rank, call in slot.called.items():
                    if (value := differing.read(call)) is not None:
                        camps.setdefault(value, []).append(rank)
                if len(camps) > 1:
                    largest_first = sorted(camps.values(), key=lambda ranks: (-len(ranks), ranks))
                    return [_make_mismatch(slot, largest_first, differing)]
    return []


def _make_mismatch(slot: Slot, camps: list[list[int]], differing: Property) -> CollectiveVerdict:
    # ranks that have not called it yet, that have not answered, or of which it is not known what they have called
    unknown = len(slot.key.ranks) - sum(map(len, camps))
    has_majority = len(camps[0]) > len(camps[1]) + unknown
    odd = camps[1:] if has_majority else camps[:1]
    phrases = [
        (camp, _format_camps(slot.called, [camp, *(other for other in camps if other is not camp)], differing))
        for camp in odd
    ]
    return CollectiveVerdict(
        VerdictKind.MISMATCH,
        slot.key,
        "; ".join(f"{format_ranks(camp)} {phrase}" for camp, phrase in phrases),
        {rank: phrase for camp, phrase in phrases for rank in camp} if has_majority else {},
        max(call.seconds for call in slot.called.values()),
    )


def _format_camps(called: Mapping[int, Collective], camps: list[list[int]], differing: Property) -> str:
    parts = []
    for camp in camps:
        call, is_first = called[camp[0]], camp is camps[0]
        who = "called" if is_first else format_ranks(camp)
        group = "" if call.group == DEFAULT_GROUP else f" of {call.group_title}"
        title = f"{call.title}{group} " if is_first or differing is OPERATION else ""
        parts.append(f"{who} {title}with {differing.describe(call)}{_format_place(call)}")
    return ", ".join(parts)


def _format_place(call: Collective) -> str:
    return f" ({call.place})" if call.place else ""


# --- Absent ranks ---


def _find_absent(calls: Calls, answers: Mapping[int, RankCollectives], returned: set[int]) -> list[CollectiveVerdict]:
    waiting: dict[Slot, list[int]] = {}
    for rank, of_rank in calls.by_rank.items():
        slot = next((slot for slot, call in of_rank.items() if is_waiting(call)), None)
        if slot is not None:
            waiting.setdefault(slot, []).append(rank)
    absent_from = {slot: absent for slot in calls.slots if slot in waiting and (absent := calls.find_absent(slot))}
    blocked = {rank: call for rank, answer in answers.items() if (call := _find_block(answer)) is not None}
    verdicts, crossed = [], []
    for slot, absent in absent_from.items():
        if to_blame := absent & returned or absent - blocked.keys():
            have_returned = to_blame <= returned
            verdicts.append(_make_absent(slot, waiting[slot], calls, sorted(to_blame), have_returned=have_returned))
        else:
            crossed.append(slot)
    verdicts.sort(key=lambda verdict: (not verdict.have_returned, -verdict.seconds))
    if closed := _find_closed(crossed, waiting, absent_from) or (crossed if not verdicts else []):
        verdicts.append(_make_crossed(calls, {slot: waiting[slot] for slot in closed}, absent_from, blocked))
    return verdicts


def _find_closed(slots: list[Slot], waiting: Mapping[Slot, list[int]], absent_from: Mapping[Slot, set[int]]) -> list[Slot]:
    """Select the collectives in which ranks wait for one another: each absent rank waits in another of them."""
    while True:
        inside = {rank for slot in slots for rank in waiting[slot]}
        closed = [slot for slot in slots if absent_from[slot] <= inside]
        if len(closed) == len(slots):
            return closed
        slots = closed


def _find_block(answer: RankCollectives) -> Collective | None:
    """Return a call in which the rank waits, also `recv` and the like. Prefer one whose source line is known."""
    pending = [call for call in answer.collectives if is_waiting(call)]
    return next((call for call in pending if call.place), pending[0] if pending else None)


def _make_absent(
    slot: Slot, waiting: list[int], calls: Calls, absent: list[int], *, have_returned: bool
) -> CollectiveVerdict:
    call = slot.called[waiting[0]]
    where = f"{call.title} ({', '.join(filter(None, (call.tensors, call.group_title)))})"
    wait = _format_wait(waiting)
    evidence = {}
    for rank in absent:
        last = next(reversed(calls.by_rank[rank].values()), None)
        history = f"its last collective was {last.title}{_format_place(last)}" if last else "it has called no collective"
        if have_returned:
            evidence[rank] = f"has returned, but {wait} for it in {where}{_format_place(call)}; {history}"
        else:
            evidence[rank] = f"has not joined {where}, in which {wait}{_format_place(call)}; {history}"
    return CollectiveVerdict(
        VerdictKind.ABSENT,
        slot.key,
        "; ".join(f"rank {rank} {evidence[rank]}" for rank in absent),
        evidence,
        max(slot.called[rank].seconds for rank in waiting),
        have_returned=have_returned,
    )


def _format_wait(ranks: list[int]) -> str:
    return f"{format_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _make_crossed(
    calls: Calls,
    waiting: Mapping[Slot, list[int]],
    absent_from: Mapping[Slot, set[int]],
    blocked: Mapping[int, Collective],
) -> CollectiveVerdict:
    """Blame nobody if the cause may be a rank that is not in `waiting`."""
    first, *others = sorted(waiting, key=lambda slot: (-len(waiting[slot]), slot.key))
    inside = {rank for ranks in waiting.values() for rank in ranks}
    is_complete = all(absent_from[slot] <= inside and calls.knows_all(slot) for slot in waiting)
    has_majority = is_complete and all(len(waiting[first]) > len(waiting[slot]) for slot in others)
    evidence = {}
    for rank in sorted(absent_from[first]):
        doing = "waits in" if blocked[rank].place else "has not completed"
        in_first = first.called[waiting[first][0]]
        evidence[rank] = f"{doing} {blocked[rank]}, but {_format_wait(waiting[first])} for it in {in_first}"
    if has_majority or not is_complete:
        sentence = "; ".join(f"rank {rank} {text}" for rank, text in evidence.items())
    else:
        parts = [f"{_format_wait(waiting[slot])} in {slot.called[waiting[slot][0]]}" for slot in (first, *others)]
        sentence = f"{', '.join(parts)}: they wait for one another"
    return CollectiveVerdict(
        VerdictKind.CROSSED,
        first.key,
        sentence,
        evidence if has_majority else {},
        max(slot.called[rank].seconds for slot, ranks in waiting.items() for rank in ranks),
        is_complete=is_complete,
    )
