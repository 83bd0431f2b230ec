"""Reads what ranks send, makes events for the machines of it, and asks for stacks. Runs in the watcher thread.

    channel: messages ----------------------.
    stack pipe: stacks ---------------------+--> observations of the rank, and events
    socket of collectives: a crash ---------+
    pidfd: its exit ------------------------'

The last message of a rank is read before its exit: `_on_exit` reads the rest of its channel first.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from mpwatch.options.spec import GroupSpec
from mpwatch.os_support.clock import monotonic, wall_time
from mpwatch.os_support.processes import is_ending
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.results.stacks import Stacks
from mpwatch.results.texts import clean_line
from mpwatch.watcher.diagnosis.death_order import DeathClock
from mpwatch.watcher.diagnosis.failures import is_crash
from mpwatch.watcher.diagnosis.peer_errors import PeerErrorKind, classify_exception
from mpwatch.watcher.diagnosis.stack_dumps import add_source_lines, cut_frames_of_mpwatch
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.observers.stack_requests import StackRequests
from mpwatch.watcher.processes.process_pool import ProcessPool
from mpwatch.watcher.processes.rank import Rank
from mpwatch.wire.messages import Message, MessageKind

CRASH_HOLD_SECONDS = 0.1  # how long a crashing rank may take to answer; it cannot if the crashing thread holds the GIL
NATIVE_DUMP_SECONDS = 0.05  # later than the request in Python; a rank that runs Python code answers in milliseconds


class RankReader:
    """The reading half of the event loop."""

    def __init__(
        self,
        pool: ProcessPool,
        spec: GroupSpec,
        *,
        call_at: Callable[[float, Callable[[], object]], object],
        wake: Callable[[], object],
        on_stop_request: Callable[[Rank], object],
        debugger_sockets: deque[tuple[int, int]],
        on_visit: Callable[[Rank, int], object],
    ) -> None:
        self._pool, self._spec, self._is_multi_node = pool, spec, spec.is_multi_node
        self._call_at, self._on_stop_request, self._on_visit = call_at, on_stop_request, on_visit
        self._wake, self._debugger_sockets = wake, debugger_sockets
        self._death_clock = DeathClock()
        self._stack_requests = StackRequests(self._request_stacks_of_running_rank, self._format_stacks, call_at, wake)
        self._wall_started_at = wall_time()  # source files that are newer are not quoted in stack dumps

    def register(self, rank: Rank) -> None:
        handlers = (self._on_message, self._on_stack_data, self._on_exit)
        rank.register(*(partial(handler, rank) for handler in handlers))

    def start_wakeup(self) -> None:
        """What is read from now on is read in another wake-up, maybe a late one."""
        self._death_clock.start_wakeup()

    def send_stacks(self, receive: Callable[[Stacks], object], ranks: Iterable[Rank]) -> None:
        self._stack_requests.begin(receive, ranks)

    def _on_message(self, rank: Rank) -> list[m.RankEvent]:
        events: list[m.RankEvent] = []
        for message in rank.read_messages():
            events += self._handle_message(rank, message)
            if message.kind is MessageKind.FAILING:
                self._find_dying_ranks(rank)
                self._death_clock.record_message(message.stamp)
        if rank.channel.fileno() == -1 and is_ending(rank.process.pid):
            self._death_clock.record_dying(rank.observations)
        return events

    def _find_dying_ranks(self, failing: Rank) -> None:
        """Find the ranks whose death may have caused the failure of another rank, although they have not exited yet."""
        for rank in self._pool.alive.values():
            is_unanswered = rank.observations.answer is None and rank.observations.raised_at is None
            if is_unanswered and rank is not failing and rank.is_dying():
                self._death_clock.record_dying(rank.observations)

    def _handle_message(self, rank: Rank, message: Message) -> Sequence[m.RankEvent]:
        number, observed = rank.number, rank.observations
        if message.kind is MessageKind.READY:
            rank.on_ready(message.body)
            return [m.Ready(number)]
        if message.kind is MessageKind.DEBUGGER and message.body:
            self._on_visit(rank, message.fd)
        elif message.kind is MessageKind.DEBUGGER:
            self._debugger_sockets.append((number, message.fd))
            self._wake()
        elif message.kind is MessageKind.ITEM:
            if rank.call is not None:
                rank.call.values.append(message.body if message.file is None else message.file)
                self._wake()
        elif message.kind is MessageKind.STOP_REQUESTED:
            if rank.call is not None:
                self._on_stop_request(rank)
        elif message.kind is MessageKind.COLLECTIVES:
            if message.fd != -1:  # it was lost, for want of descriptors
                rank.collective_socket.open(message.fd, partial(self._on_crash, rank))
                if rank.call is not None:
                    rank.call.monitor.start()
        elif message.kind is MessageKind.CALLED_COLLECTIVES:
            self._read_collectives(rank, message.body)
            return self.end_dump(rank)
        elif message.kind is MessageKind.EXIT_BLOCKED:
            if rank.call is not None:
                rank.call.exit_blockers[number] = clean_line(message.body.decode(errors="replace"))
        elif message.kind is MessageKind.DETAILS:
            observed.details = message.body
            return [] if self._spec.debug == "locals" else [m.DetailsReceived(number)]
        elif message.kind is MessageKind.LOCALS:
            observed.local_variables = message.body
            return [m.DetailsReceived(number)]
        elif message.kind is MessageKind.FAILING:
            observed.raised_at = message.stamp
            return [m.Failing(number)]
        else:
            return [self._read_answer(rank, message)]
        return []

    def _read_answer(self, rank: Rank, message: Message) -> m.RankEvent:
        rank.observations.answer, rank.observations.answer_received_at = message, monotonic()
        if message.kind is MessageKind.RETURNED:
            if self._is_multi_node:  # it exits when all ranks of this node have returned; others may wait for it
                self.request_collectives([rank])
            return m.Returned(rank.number)
        peer_error = classify_exception(message.body)
        return m.Failed(rank.number, is_secondary=peer_error not in (None, PeerErrorKind.HINT))

    def _on_stack_data(self, rank: Rank) -> list[m.RankEvent]:
        was_complete = rank.stack_parser.is_complete()
        rank.read_stack_pipe()
        if was_complete or not rank.stack_parser.is_complete():
            return []
        self._stack_requests.add_stacks(rank)
        return self.end_dump(rank)

    def end_dump(self, rank: Rank) -> list[m.RankEvent]:
        """Return StackDumped if a machine waits for it, and all has come. A rank that has answered sends no stacks."""
        lacks_stacks = rank.observations.answer is None and rank.stack_parser.is_dump_pending()
        is_pending = rank.collective_socket.is_pending or lacks_stacks
        if is_pending or not rank.awaits_dump or rank.observations.has_exited:
            return []
        rank.awaits_dump = False
        return [m.StackDumped(rank.number)]

    def _read_collectives(self, rank: Rank, body: bytes) -> None:
        answer = None
        with suppress(ValueError, LookupError, TypeError):  # it is empty, or the rank has overwritten its own memory
            answer = RankCollectives.from_json(body)
        if rank.observations.raised_at is not None:  # it was not asked
            rank.observations.add_collectives(answer)
        rank.collective_socket.pass_on(answer)

    def _on_crash(self, rank: Rank) -> list[m.RankEvent]:
        """Before a crashing rank dies, ask the ranks of its call for their collectives."""
        if not (rank.collective_socket.hold_crash() and rank.collective_socket.ask(self._read_crash, rank)):
            return self._read_crash(rank)
        if rank.call is not None:
            self.request_collectives(rank.call.members.values())
        self._call_at(monotonic() + CRASH_HOLD_SECONDS, partial(self._read_crash, rank))
        return []

    def _read_crash(self, rank: Rank, _answer: RankCollectives | None = None) -> list[m.RankEvent]:
        rank.stack_parser.feed(rank.collective_socket.read_crash(partial(self._read_crash, rank)))
        return []

    def request_collectives(self, ranks: Iterable[Rank]) -> None:
        """Ask for what the report says of them. A rank that has raised sends it without being asked."""
        for rank in ranks:
            if rank.observations.raised_at is None:
                rank.collective_socket.ask(rank.observations.add_collectives)

    def _on_exit(self, rank: Rank) -> list[m.RankEvent]:
        """Read everything that a dead rank has sent, and then the exit code of its process."""
        observed = rank.observations
        if observed.has_exited:
            return []
        events = self._on_message(rank)
        rank.read_stack_pipe()
        self._read_crash(rank)
        rank.collective_socket.close()
        self._death_clock.record_death(observed)
        observed.exit_code = rank.process.read_exit_code()
        self.finish_observations(rank)
        self._stack_requests.add_stacks(rank)
        return [*events, m.Exited(rank.number)]

    def finish_observations(self, rank: Rank) -> None:
        observed, parser = rank.observations, rank.stack_parser
        self.read_slot(rank)
        self.take_stacks(rank)
        if is_crash(observed.exit_code):  # otherwise a forked child has written the stack
            observed.crash_stack = add_source_lines(parser.crash_stack, self._wall_started_at)
        observed.startup_output = rank.read_startup_output()

    def read_slot(self, rank: Rank) -> None:
        rank.observations.heartbeat = rank.slot.read_heartbeat()
        rank.observations.stopped_step = rank.slot.read_stopped_step()

    def take_stacks(self, rank: Rank) -> None:
        """Store the rank's stacks, if they were dumped for the report."""
        if rank.observations.is_dump_for_report:
            rank.observations.stacks = self._format_stacks(rank)

    def _format_stacks(self, rank: Rank) -> str:
        return add_source_lines(cut_frames_of_mpwatch(rank.stack_parser.dump), self._wall_started_at)

    def request_stacks(self, rank: Rank) -> bool:
        if rank.stack_parser.is_dump_pending():
            return True
        if not rank.request_stack_dump():
            return False
        ask_natively = partial(rank.request_native_stack_dump, rank.stack_parser.dump_count)
        self._call_at(monotonic() + NATIVE_DUMP_SECONDS, ask_natively)
        return True

    def _request_stacks_of_running_rank(self, rank: Rank) -> bool:
        """Ask a rank for its stacks. If it has already sent stacks for the report, store these first."""
        if rank.stack_parser.is_complete():
            self.take_stacks(rank)
            rank.observations.is_dump_for_report = False
        return self.request_stacks(rank)
