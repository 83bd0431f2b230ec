"""Answers requests for the stacks and collectives of all ranks, without stopping the ranks. Runs in the watcher thread.

A rank is asked by a signal (rank.py), and over its socket of collectives. The answer goes out when all have answered, or
STACK_DUMP_SECONDS later. The machines and the CollectiveMonitor ask the ranks, too; one answer of a rank is enough for all.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from mpwatch.os_support.clock import monotonic
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.diagnosis.collective_verdict import find_verdict, get_current_collective
from mpwatch.watcher.diagnosis.stragglers import describe_blocked_process
from mpwatch.watcher.machine.transitions import STACK_DUMP_SECONDS, RankPhase
from mpwatch.watcher.processes.rank import Rank

WITHOUT_STACK = {
    RankPhase.STARTING: "starting",
    RankPhase.READY: "waiting for a call",
    RankPhase.RUNNING: "running; no stack came in time",
    RankPhase.RETURNED: "has returned",
    RankPhase.FAILED: "has raised an exception",
    RankPhase.DETAILS_SENT: "has raised an exception",
    RankPhase.EXITING: "has returned, and is exiting",
    RankPhase.TERMINATING: "was sent a signal to stop; no stack came in time",
    RankPhase.KILLED: "was sent SIGKILL",
    RankPhase.EXITED: "has exited",
    RankPhase.ABANDONED: "was sent SIGKILL, and has not exited",
}


WITHOUT_FUNCTION = (RankPhase.STARTING, RankPhase.READY, RankPhase.RETURNED, RankPhase.DETAILS_SENT)


@dataclass(eq=False)
class StackRequests:
    ask: Callable[[Rank], bool]  # asks a rank for its stacks; False: the rank cannot send them
    format_stacks: Callable[[Rank], str]  # returns the stacks that a rank has sent, as text
    call_at: Callable[[float, Callable[[], object]], object]
    wake: Callable[[], object]  # wakes up the threads that wait for an answer

    def __post_init__(self) -> None:
        self._receivers: list[Callable[[Stacks], object]] = []
        self._asked: set[Rank] = set()  # ranks whose stacks have not come
        self._asked_for_collectives: set[Rank] = set()  # ranks whose collectives have not come
        self._stacks: dict[int, str] = {}  # that have come
        self._collectives: dict[int, RankCollectives] = {}  # that have come
        self._returned: list[int] = []  # ranks that had returned

    def begin(self, receive: Callable[[Stacks], object], ranks: Iterable[Rank]) -> None:
        """Ask all ranks for their stacks, unless they are still answering an earlier request."""
        self._receivers.append(receive)
        if len(self._receivers) > 1:
            return
        self._stacks.clear()
        self._collectives.clear()
        self._returned.clear()
        for rank in sorted(ranks, key=lambda rank: rank.number):
            phase = rank.phase
            self._stacks[rank.number] = WITHOUT_STACK[phase]
            if phase is RankPhase.RETURNED:
                self._returned.append(rank.number)
            if rank.is_reaped:
                continue
            if rank.collective_socket.ask(self._add_collectives, rank):
                self._asked_for_collectives.add(rank)
            if phase in WITHOUT_FUNCTION:
                continue
            if self.ask(rank):
                self._asked.add(rank)
            elif reason := describe_blocked_process(rank.observations):
                self._stacks[rank.number] = reason
        self.call_at(monotonic() + STACK_DUMP_SECONDS, partial(self._answer, self._receivers))
        self._answer_if_complete()

    def add_stacks(self, rank: Rank) -> None:
        if rank in self._asked:
            self._take(rank)
            self._answer_if_complete()

    def _add_collectives(self, rank: Rank, answer: RankCollectives | None) -> None:
        if rank in self._asked_for_collectives:
            self._asked_for_collectives.discard(rank)
            if answer is not None:
                self._collectives[rank.number] = answer
            self._answer_if_complete()

    def _answer_if_complete(self) -> None:
        if not self._asked and not self._asked_for_collectives:
            self._answer(self._receivers)

    def _take(self, rank: Rank) -> None:
        self._asked.discard(rank)
        self._stacks[rank.number] = self.format_stacks(rank) or self._stacks[rank.number]
        if not rank.observations.is_dump_for_report:
            rank.stack_parser.end_dump()

    def _answer(self, receivers: list[Callable[[Stacks], object]]) -> None:
        """Answer these requests with what has come so far, unless they were answered earlier."""
        if receivers is not self._receivers:
            return
        for rank in list(self._asked):
            self._take(rank)
        self._asked_for_collectives.clear()
        current = {rank: call for rank, answer in self._collectives.items() if (call := get_current_collective(answer))}
        verdict = find_verdict(self._collectives, self._returned)
        self._receivers = []
        for receive in receivers:
            receive(Stacks(self._stacks, current, verdict.sentence if verdict else ""))
        self.wake()
