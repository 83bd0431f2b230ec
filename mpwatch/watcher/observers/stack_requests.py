"""Answers requests for the stacks and collectives of all ranks, without stopping the ranks. Runs in the watcher thread.

    any thread --- StacksRequest ---> `begin` asks each rank by a signal (rank_handle.py), and over its request socket
                                      `add_stacks`, `add_collectives`: the stacks or collectives of a rank have come
    any thread <--- its `stacks` ---- all have come, or STACK_DUMP_SECONDS later

The state machine and the CollectiveMonitor also ask the ranks for stacks or collectives. If several requests wait for an
answer of the same rank, one answer of this rank is enough for all of them.
"""

from collections.abc import Callable, Sequence

from mpwatch.os_support.clock import monotonic
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.commands import CommandQueue, StacksRequest
from mpwatch.watcher.diagnosis.collective_verdict import find_verdict, get_current_collective
from mpwatch.watcher.diagnosis.stragglers import describe_blocked_process
from mpwatch.watcher.machine.transitions import STACK_DUMP_SECONDS, RankPhase
from mpwatch.watcher.processes.process_pool import ProcessPool
from mpwatch.watcher.processes.rank_handle import RankHandle
from mpwatch.watcher.restarts.restart_group import RestartGroup

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


class StackRequests:
    """The unanswered requests for the stacks of all ranks.

    Args:
        pool: the processes of the ranks.
        commands: the command queue. An answer wakes up its callers.
        ask: asks a rank for its stacks. Returns False if the rank cannot send them.
        format_stacks: returns the stacks that a rank has sent, as text.
        call_at: calls a function in this thread at a time of CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        pool: ProcessPool,
        commands: CommandQueue,
        *,
        ask: Callable[[RankHandle], bool],
        format_stacks: Callable[[RankHandle], str],
        call_at: Callable[[float, Callable[[], object]], object],
    ) -> None:
        self._pool = pool
        self._commands = commands
        self._ask = ask
        self._format_stacks = format_stacks
        self._call_at = call_at
        self._requests: list[StacksRequest] = []
        self._asked: set[RankHandle] = set()  # ranks whose stacks have not come
        self._asked_for_collectives: set[RankHandle] = set()  # ranks whose collectives have not come
        self._stacks: dict[int, str] = {}  # that have come
        self._collectives: dict[int, RankCollectives] = {}  # that have come
        self._returned: list[int] = []  # ranks that had returned

    def begin(self, request: StacksRequest, groups: Sequence[RestartGroup]) -> None:
        """Ask all ranks for their stacks, unless the ranks are still answering an earlier request."""
        self._requests.append(request)
        if len(self._requests) > 1:
            return
        self._stacks.clear()
        self._collectives.clear()
        self._returned.clear()
        ranks = [(rank, phase) for group in groups for rank, phase in group.machine.phase_table.phases.items()]
        for rank, phase in sorted(ranks, key=lambda item: item[0]):
            self._stacks[rank] = WITHOUT_STACK[phase]
            handle = self._pool.handles.get(rank)
            if phase is RankPhase.RETURNED:
                self._returned.append(rank)
            if handle is not None and handle.collective_sockets.ask():
                self._asked_for_collectives.add(handle)
            if handle is None or phase in WITHOUT_FUNCTION:
                continue
            if self._ask(handle):
                self._asked.add(handle)
            elif reason := describe_blocked_process(handle.observations):
                self._stacks[rank] = reason
        if self._asked or self._asked_for_collectives:
            self._call_at(monotonic() + STACK_DUMP_SECONDS, self._answer)
        else:
            self._answer()

    def add_stacks(self, handle: RankHandle) -> None:
        """Record the stacks of a rank. Call this method when the rank has sent all its stacks, or has exited."""
        if handle in self._asked:
            self._take(handle)
            self._answer_if_complete()

    def add_collectives(self, handle: RankHandle, answer: RankCollectives | None) -> None:
        """Record the collectives of a rank. `answer` is None if the rank cannot send its collectives."""
        if handle in self._asked_for_collectives:
            self._asked_for_collectives.discard(handle)
            if answer is not None:
                self._collectives[handle.observations.worker.rank] = answer
            self._answer_if_complete()

    def _answer_if_complete(self) -> None:
        if not self._asked and not self._asked_for_collectives:
            self._answer()

    def _take(self, handle: RankHandle) -> None:
        self._asked.discard(handle)
        rank = handle.observations.worker.rank
        self._stacks[rank] = self._format_stacks(handle) or self._stacks[rank]
        if not handle.observations.is_dump_for_report:
            handle.stack_parser.end_dump()

    def _answer(self) -> None:
        """Answer all requests with the stacks and collectives that the ranks have sent so far."""
        for handle in list(self._asked):
            self._take(handle)
        self._asked_for_collectives.clear()
        current = {rank: call for rank, answer in self._collectives.items() if (call := get_current_collective(answer))}
        verdict = find_verdict(self._collectives, self._returned)
        for request in self._requests:
            request.stacks = Stacks(self._stacks, current, verdict.sentence if verdict else "")
            request.is_answered.set()
        if self._requests:
            self._commands.wake_callers()
        self._requests.clear()
