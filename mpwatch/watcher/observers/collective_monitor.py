"""Checks every few seconds whether the ranks have called matching collectives. Runs in the watcher thread.

    CHECK_SECONDS later --- ask all ranks ---> ranks answer --- all have answered, or ANSWER_SECONDS later ---> find_verdicts
        MISMATCH, twice ---> the machine's event EndCall
        ABSENT or CROSSED, and the first rank has waited for `stall_after` ---> one warning for each collective
        as above, but the absent ranks have returned ---> EndCall
        on one node, SlowRankFinder names a rank for which the others often wait ---> the event SlowRank

A mismatch must be found twice in a row, since some collectives succeed even with different data types. All waits begin anew
after a suspension of the program or its limits.

On several nodes, only mismatches among the ranks of this node are found here. The leader compares the ranks of all nodes.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from mpwatch.os_support.clock import monotonic
from mpwatch.results.model import Lateness
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.collective_verdict import (
    CollectiveVerdict,
    Finding,
    VerdictKind,
    find_verdicts,
    format_stall_warning,
    get_current_collective,
    select_new_stalls,
)
from mpwatch.watcher.diagnosis.slow_rank import SlowRankFinder
from mpwatch.watcher.inbox import Outbox
from mpwatch.watcher.processes.rank import Rank
from mpwatch.wire.messages import MessageKind

CHECK_SECONDS = 5.0  # between two checks, at most
CHECKS_PER_STALL = 4  # in `stall_after`, if that is shorter
MIN_CHECK_SECONDS = 0.05  # between two checks, at least
ANSWER_SECONDS = 1.0  # a rank that needs longer holds the GIL, or is stopped
CONFIRM_SECONDS = 1.0  # from the first to the second finding of a mismatch


StallCallback = Callable[[Mapping[int, RankCollectives], list[int]], object]


@dataclass(eq=False)
class CollectiveMonitor:
    """Checks the collectives during the calls of a run, or during one call of a WorkerGroup."""

    list_ranks: Callable[[], Collection[Rank]]
    stall_after: float  # math.inf: nothing is checked
    outbox: Outbox
    is_called: Callable[[int], bool]  # whether a rank takes part in the call; the others may return later than it
    is_checking: Callable[[], bool]  # whether a call is running, and its limits are not suspended
    call_at: Callable[[float, Callable[[], object]], object]
    end_call: Callable[[], object]
    on_slow_rank: Callable[[Lateness], object]
    # On several nodes, called when the stalled ranks of this node have changed: with the collectives of all ranks, or with
    # none if no rank is stalled, and with the ranks that have returned. None on one node.
    on_stall: StallCallback | None
    now: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        self._is_started = self._is_closed = False
        self.begin_call()

    def begin_call(self) -> None:
        self.final_verdict: CollectiveVerdict | None = None  # which has ended the call
        self._called_at = self.now()
        self._asked: set[Rank] = set()  # ranks that have not answered
        self._asked_at = -math.inf
        self._answers: dict[int, RankCollectives] = {}
        self._last_mismatch: CollectiveVerdict | None = None
        self._warned: set[Finding] = set()
        self._waits_since = -math.inf  # no wait counts from an earlier time
        self.lateness: Lateness | None = None  # of the slow rank, as of the last check
        self._slow_ranks, self._named_rank = SlowRankFinder(), -1
        self._known_stall: object = None  # what `on_stall` was called with

    def start(self) -> None:
        if not self._is_started and self.stall_after < math.inf:
            self._is_started = True
            self._check_later()

    def restart_waits(self) -> None:
        self._waits_since = self.now()

    def close(self) -> None:
        self._is_closed = True

    def _check_later(self) -> None:
        period = max(MIN_CHECK_SECONDS, min(CHECK_SECONDS, self.stall_after / CHECKS_PER_STALL))
        self.call_at(self.now() + period, self._check_and_repeat)

    def _check_and_repeat(self) -> None:
        if not self._is_closed:
            self._check_later()
            self._check()

    def _check(self) -> None:
        ranks = [rank for rank in self.list_ranks() if rank.collective_socket.is_open]
        can_compare = len(ranks) > 1 or self.on_stall is not None
        if not self.is_checking():
            self.restart_waits()
        elif not self._asked and can_compare:
            self._answers, self._asked_at = {}, self.now()
            self._asked = {rank for rank in ranks if rank.collective_socket.ask(self._add, rank)}
            self.call_at(self.now() + ANSWER_SECONDS, partial(self._stop_waiting, self._asked))

    def _add(self, rank: Rank, answer: RankCollectives | None) -> None:
        if rank in self._asked:
            self._asked.discard(rank)
            if answer is not None:
                self._answers[rank.number] = answer
            if not self._asked:
                self._judge()

    def _stop_waiting(self, asked: set[Rank]) -> None:
        if asked is self._asked and asked:  # the check is not over
            asked.clear()
            self._judge()

    def _judge(self) -> None:
        if not self._answers:  # no rank can answer now
            return
        if not self.is_checking():
            self._last_mismatch = None
            return
        returned = [
            rank.number
            for rank in self.list_ranks()
            if self.is_called(rank.number)
            and rank.observations.answer is not None
            and rank.observations.answer.kind is MessageKind.RETURNED
        ]
        if self.on_stall is not None:
            self._report_stall(self.on_stall, returned)
        else:
            self._find_slow_rank()
        verdicts = find_verdicts(self._answers, returned)
        mismatch = next((verdict for verdict in verdicts if verdict.kind is VerdictKind.MISMATCH), None)
        last, self._last_mismatch = self._last_mismatch, mismatch
        if mismatch is None:
            if self.on_stall is None:
                self._handle_stalls(verdicts)
        elif last is not None and (last.finding, last.blamed) == (mismatch.finding, mismatch.blamed):
            self._finish(mismatch)
        else:
            self.call_at(self.now() + CONFIRM_SECONDS, self._check)

    def _finish(self, verdict: CollectiveVerdict) -> None:
        self.final_verdict = verdict
        self.end_call()

    def _handle_stalls(self, verdicts: list[CollectiveVerdict]) -> None:
        stalls = [verdict for verdict in verdicts if self._get_wait(verdict) >= self.stall_after]
        if final := next((stall for stall in stalls if stall.have_returned), None):
            self._finish(final)
            return
        for stall in select_new_stalls(stalls, self._warned):
            self.outbox.warn("%s", format_stall_warning(stall, self._answers, self._get_wait(stall)))

    def _get_wait(self, verdict: CollectiveVerdict) -> float:
        return min(verdict.seconds, self._asked_at - self._waits_since)

    def _report_stall(self, on_stall: StallCallback, returned: list[int]) -> None:
        has_called_long_ago = self.now() - self._called_at >= self.stall_after
        stalled = {
            rank
            for rank, answer in self._answers.items()
            if (answer.collectives[-1].seconds >= self.stall_after if answer.collectives else has_called_long_ago)
        }
        stall = dict(self._answers) if stalled else {}
        current = {rank: get_current_collective(answer) for rank, answer in stall.items()}
        known = (current, stalled, returned) if stalled else None
        if known != self._known_stall:
            self._known_stall = known
            on_stall(stall, returned)

    def _find_slow_rank(self) -> None:
        answers = {rank: answer for rank, answer in self._answers.items() if self.is_called(rank)}
        self._slow_ranks.add(answers)
        late = self.lateness = self._slow_ranks.find()
        if late is not None and late.rank != self._named_rank and (late.place or self._slow_ranks.has_all_checks):
            self._named_rank = late.rank
            self.on_slow_rank(late)
