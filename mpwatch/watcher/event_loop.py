"""The loop of the watcher thread: start ranks, wait for events, pass events to state machines, execute their actions.

This module runs in the watcher thread (watcher_thread.py), and runs no user code.

    commands of the caller ----.
    channels: messages --------+--> Selector.wait(deadline) --> events --> StateMachine of each RestartGroup
    stack pipes: stack dumps --+              ^                                       |
    pidfds: exits -------------'              |                                    actions
                                              |                                       |
          ranks: start, call, signal, dump stacks, request exit <---------------------'

    answers to the caller: state, statuses, observations of each attempt (commands.py), events (event_bus.py), log records

Guarantees:

- When `EventLoop.run` ends, every rank is dead and reaped, with two exceptions: a rank that SIGKILL cannot end, and a dead
  rank that a debugger traces (process_pool.py). mpwatch logs a warning about each rank that is still alive or not reaped.
- The loop handles the last message of a rank before it handles the rank's exit. When a rank has ended, `_on_exit` reads the
  rest of the rank's channel before it reads the rank's exit code.
- The loop waits for events in one place, `Selector.wait`. If no event comes, `Selector.wait` returns at the earliest of
  these times: the deadline of a state machine, and the time of a delayed action. The loop also waits while the whole program
  is suspended (suspension.py). All other waits of the loop are short. Before a restart, the loop waits at most KILL_SECONDS
  until the killed child processes of dead ranks have ended. If a debugger traces a dead rank, the loop waits at most 50 ms
  for the rank's exit code. To reap this rank, the loop waits at most 50 ms more.
- The loop handles all events of a wake-up before it executes the first action. So the loop has recorded all deaths of this
  wake-up before it sends a signal that could kill a rank.
"""

import heapq
import math
import platform
import signal
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from functools import partial

from mpwatch.errors import LaunchError
from mpwatch.events.types import WorkerStarted
from mpwatch.options.spec import GroupSpec
from mpwatch.os_support.clock import monotonic, wall_time
from mpwatch.os_support.processes import is_ending
from mpwatch.results.clean_text import clean_line
from mpwatch.results.failure import format_exit
from mpwatch.results.model import WorkerState
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.commands import (
    CallEvent,
    CommandQueue,
    DebuggerSocket,
    DelayedAction,
    RestartCommand,
    StacksRequest,
    StartLostRanks,
    StatusRequest,
    StopAfter,
    Suspend,
)
from mpwatch.watcher.diagnosis.death_order import DeathClock
from mpwatch.watcher.diagnosis.failures import is_crash, may_be_oom_kill
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.diagnosis.oom import OomDetector
from mpwatch.watcher.diagnosis.peer_errors import classify_exception
from mpwatch.watcher.diagnosis.stack_dumps import add_source_lines, cut_frames_of_mpwatch
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.observers.collective_monitor import CollectiveMonitor, StallCallback
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.stack_requests import StackRequests
from mpwatch.watcher.observers.status_snapshot import current_statuses
from mpwatch.watcher.output.rank_output import RankOutput
from mpwatch.watcher.pending_call import PendingCall
from mpwatch.watcher.processes.process_pool import ProcessPool
from mpwatch.watcher.processes.rank_environment import RankSetup
from mpwatch.watcher.processes.rank_handle import RankHandle
from mpwatch.watcher.restarts.restart_group import RestartGroup, state_of_all
from mpwatch.watcher.stop_agreements import StepsHeldCallback, StopAgreements
from mpwatch.watcher.suspension import suspend_processes
from mpwatch.wire.messages import Message, MessageKind
from mpwatch.wire.resource_errors import with_remedy

OutcomeCallback = Callable[[StateMachine], object]  # see EventLoop: on_outcome_change
StopCallback = Callable[[str], bool]  # see EventLoop: on_stop

CRASH_HOLD_SECONDS = 0.1  # how long a crashing rank may take to answer; it cannot if the crashing thread holds the GIL

NATIVE_DUMP_SECONDS = 0.05  # later than the request in Python; a rank that runs Python code answers in milliseconds

WAKE_SECONDS = 0.5  # later than the signal that stops a rank; most ranks have ended by then


class EventLoop:
    """The event loop of one run or one WorkerGroup. If all ranks of a WorkerGroup are lost, its event loop ends.

    Args:
        spec: options of the run or the WorkerGroup.
        setups: the ranks. The list is empty on several nodes, where a RestartCommand has the ranks.
        commands: commands of the caller's threads, and the answers.
        deferred_log: log records, which the caller's thread emits.
        event_bus: events, which the caller's thread passes to the observers.
        output: where stdout and stderr of the ranks go.
        keep_ranks: whether the ranks stay after a call, for the next call.
        on_outcome_change: is called in this thread, with the state machine, when it becomes clear how an attempt ends. It is
            called again when all ranks of that attempt have exited.
        on_stall: is called in this thread on several nodes. See CollectiveMonitor. `on_stall` is None on a single node.
        on_stop: is called in this thread on several nodes, with the cause of a stop that is requested on this node. It
            returns whether the leader of the job handles the request.
        on_steps_held: is called in this thread on several nodes. See StopAgreements.
    """

    def __init__(
        self,
        spec: GroupSpec,
        setups: list[RankSetup],
        commands: CommandQueue,
        deferred_log: DeferredLog,
        event_bus: EventBus,
        *,
        output: RankOutput,
        keep_ranks: bool,
        on_outcome_change: OutcomeCallback,
        on_stall: StallCallback | None,
        on_stop: StopCallback | None,
        on_steps_held: StepsHeldCallback | None,
    ) -> None:
        self._keep_ranks = keep_ranks
        self._keep_going = spec.keeps_going
        setups_of_groups = [setups] if spec.policy.scope == "group" else [[setup] for setup in setups]
        # The ranks of such a WorkerGroup do not communicate, so a lost rank ends only its own call.
        self._are_independent = keep_ranks and spec.policy.scope == "worker"
        self._spec = spec
        self._all_ranks = frozenset(setup.worker.rank for setup in setups)  # empty on several nodes
        self._is_shutting_down = False  # a Shutdown has come, so no rank is started any more
        self._groups = [RestartGroup(spec, setups, event_bus, keep_ranks=keep_ranks) for setups in setups_of_groups]
        self._group_by_rank = {rank: group for group in self._groups for rank in group.setups}
        self._unfinished_groups = list(self._groups)
        self._pool = ProcessPool(deferred_log, output, spec)
        self._capture_locals = spec.debug == "locals"
        self._commands = commands
        self._event_bus = event_bus
        self._deferred_log = deferred_log
        self._oom = OomDetector()
        self._on_outcome_change = on_outcome_change
        self._lost_ranks: list[int] = []  # of a WorkerGroup: those that have ended first, so that all others end, too
        # A heap of times, actions, and between them the order in which they came.
        self._delayed_actions: list[tuple[float, int, Callable[[], object]]] = []
        self._delayed_count = 0
        self._suspend_commands: list[Suspend] = []
        self._resumed_at = -math.inf  # the end of the last suspension
        self._stack_requests = StackRequests(
            self._pool,
            commands,
            ask=self._request_stacks_of_running_rank,
            format_stacks=self._format_stacks,
            call_at=self._call_at,
        )
        self._on_stop = on_stop
        self._stop_agreements = StopAgreements(
            self._pool, event_bus, deferred_log, call_at=self._call_at, on_steps_held=on_steps_held
        )
        self._stall_after = spec.torch_backend.stall_after
        self._on_stall = on_stall
        monitor = None if keep_ranks else self._make_monitor(None)
        self._monitors = {group: monitor or self._make_monitor(group) for group in self._groups}
        self._is_multi_node = on_stall is not None
        self._death_clock = DeathClock()
        self._hostname = platform.node()
        self._wall_started_at = wall_time()  # source files that are newer are not quoted in stack dumps

    def run(self) -> None:
        """Start the ranks, and handle events until no rank is left. Raises LaunchError."""
        with self._pool:
            self._start_all_ranks()
            self._handle_events_until_finished()
        helpers_oom = self._oom.take_other_kills()
        for group in self._groups:
            if group.call is not None:  # the ranks have ended with this call
                group.call.observations.append(self._get_observations(group, helpers_oom))

    def _make_monitor(self, group: RestartGroup | None) -> CollectiveMonitor:
        """Make the monitor that watches the collectives of `group`, or of all groups of a run if `group` is None."""

        def is_checking() -> bool:
            return all(each.machine.are_limits_active() for each in ([group] if group else self._unfinished_groups))

        def list_handles() -> list[RankHandle]:
            # Ranks of other calls are included, since ranks of this call may wait for them in a collective.
            return [self._pool.handles[rank] for rank in sorted(self._pool.handles)]

        def is_called(rank: int) -> bool:
            return group is None or rank in group.setups

        def end_call(event: m.CollectivesMismatched) -> None:
            call = group.call if group else None
            self._commands.post(event if call is None else CallEvent(call, event))

        return CollectiveMonitor(
            list_handles,
            self._stall_after,
            self._deferred_log,
            is_called=is_called,
            is_checking=is_checking,
            call_at=self._call_at,
            end_call=end_call,
            on_stall=self._on_stall,
            may_call_again=self._keep_ranks,
        )

    def _get_observations(self, group: RestartGroup, helpers_oom: str) -> AttemptObservations:
        verdict = self._monitors[group].final_verdict
        return group.observations(hostname=self._hostname, helpers_oom=helpers_oom, collective_verdict=verdict)

    def _start_all_ranks(self) -> None:
        for group in self._groups:
            for rank in group.setups:
                self._start_rank(group, rank)
        self._publish_state()
        self._commands.wake_callers()
        try:
            self._pool.selector.add(self._commands.watcher_wakeup.fileno(), self._take_commands)
        except OSError as error:
            raise LaunchError(with_remedy("the ranks cannot be waited for", error)) from error

    def _start_rank(self, group: RestartGroup, rank: int) -> None:
        setup = group.setups[rank]
        handle = self._pool.start(setup)
        handle.generation = group.machine.generation
        group.observed[rank] = handle.observations
        self._event_bus.publish(WorkerStarted, [rank], attempt=setup.worker.restart_count, pid=handle.observations.pid)
        try:
            handle.register(
                self._pool.selector,
                partial(self._on_message, handle),
                partial(self._on_stack_data, handle),
                partial(self._on_exit, handle),
            )
        except OSError as error:
            raise LaunchError(with_remedy("the ranks cannot be waited for", error)) from error

    def _start_lost_ranks(self, setups: list[RankSetup]) -> None:
        for setup in [] if self._is_shutting_down else setups:
            group = self._add_group(RestartGroup(self._spec, [setup], self._event_bus, keep_ranks=True))
            self._pool.wait_for_helpers()
            self._start_rank(group, setup.worker.rank)

    def _add_group(self, group: RestartGroup) -> RestartGroup:
        self._groups.append(group)
        self._unfinished_groups.append(group)
        self._monitors[group] = self._make_monitor(group)
        self._group_by_rank |= dict.fromkeys(group.setups, group)
        return group

    def _remove_group(self, group: RestartGroup) -> None:
        self._groups.remove(group)
        self._unfinished_groups.remove(group)
        self._monitors.pop(group).close()

    def _handle_events_until_finished(self) -> None:
        events = self._handle_events(self._take_commands())
        events += self._suspend()
        while self._unfinished_groups:
            due_times = [group.due_at for group in self._unfinished_groups]
            due_times += [due_at for due_at, _, _ in self._delayed_actions[:1]]
            deadline = min(due_times)
            seconds = 0.0 if events else None if deadline == math.inf else deadline - monotonic()
            self._death_clock.start_wakeup()
            ready = self._pool.selector.wait(seconds)
            for read_events in ready:
                events += read_events()
            self._run_due_actions()
            events = self._handle_events(events)
            events += self._suspend()

    def _suspend(self) -> list[m.Event | CallEvent]:
        """If a suspension was requested, suspend all ranks until the program continues. Return the resulting events.

        After a suspension, the loop adds the duration of the suspension to all deadlines before it checks them.
        """
        events: list[m.Event | CallEvent] = []
        while self._suspend_commands:
            command = self._suspend_commands.pop(0)
            suspend_processes(command, [handle.process for handle in self._pool.handles.values()])
            suspended_at, self._resumed_at = max(command.requested_at, self._resumed_at), monotonic()
            seconds = self._resumed_at - suspended_at
            self._delayed_actions = [(due_at + seconds, number, action) for due_at, number, action in self._delayed_actions]
            for call in {id(group.call): group.call for group in self._groups}.values():
                if call is not None:
                    call.suspended_seconds += seconds
            events += self._handle_events([m.Resumed(suspended_at)])
        return events

    def _run_due_actions(self) -> None:
        now = monotonic()
        while self._delayed_actions and self._delayed_actions[0][0] <= now:
            _, _, action = heapq.heappop(self._delayed_actions)
            action()

    # ---- what is read in a wake-up, as events

    def _take_commands(self) -> list[m.Event | CallEvent]:
        events: list[m.Event | CallEvent] = []
        for command in self._commands.take():
            if isinstance(command, PendingCall):
                events.append(self._make_start(command))
            elif isinstance(command, StatusRequest) and events:
                self._commands.post(command)  # for the next wake-up: these events may start the call
            elif isinstance(command, StatusRequest):
                command.statuses = current_statuses(self._groups, self._pool)
                command.is_answered.set()
                self._commands.wake_callers()
            elif isinstance(command, StacksRequest):
                self._stack_requests.begin(command, self._groups)
            elif isinstance(command, RestartCommand):
                # The group uses them when its machine handles the event. Commands before it may end the run.
                self._group_of(command.event.rank).next_setups = command.setups
                events.append(command.event)
            elif isinstance(command, StartLostRanks):
                self._start_lost_ranks(command.setups)
            elif isinstance(command, StopAfter):
                for group in self._unfinished_groups:
                    self._stop_agreements.agree(group, command.step, command.cause)
            elif isinstance(command, Suspend):
                self._suspend_commands.append(command)
            elif isinstance(command, DelayedAction):
                self._call_at(command.due_at, command.action)
            else:
                self._is_shutting_down |= isinstance(command, m.Shutdown)
                events.append(command)
        return events

    def _make_start(self, call: PendingCall) -> CallEvent:
        if (seconds := call.stop_after) is not None:
            event = CallEvent(call, m.StopRequested(f"StopPolicy(after={seconds:g})"))
            self._call_at(call.started_at + seconds, partial(self._commands.post, event))
        return CallEvent(call, m.StartCall(call.started_at, call.timeout))

    def _on_message(self, handle: RankHandle) -> list[m.Event | CallEvent]:
        events: list[m.Event | CallEvent] = []
        for message in handle.read_messages():
            events += self._handle_message(handle, message)
            if message.kind is MessageKind.FAILING:
                self._find_dying_ranks(handle)
                self._death_clock.record_message(message.stamp)
        if handle.channel.fileno() == -1 and is_ending(handle.process.pid):
            self._death_clock.record_dying(handle.observations)
        return events

    def _find_dying_ranks(self, failing: RankHandle) -> None:
        """Find the ranks whose death may have caused the failure of another rank, although they have not exited yet."""
        for handle in self._pool.handles.values():
            is_unanswered = handle.observations.answer is None and handle.observations.raised_at is None
            if is_unanswered and handle is not failing and handle.is_dying():
                self._death_clock.record_dying(handle.observations)

    def _handle_message(self, handle: RankHandle, message: Message) -> Sequence[m.Event | CallEvent]:
        rank, observed, generation = handle.observations.worker.rank, handle.observations, handle.generation
        now = monotonic()
        if not handle.started_at <= message.stamp <= now:  # by the clock of another time namespace
            message.stamp = observed.raised_at or now
        if message.kind is MessageKind.READY:
            handle.on_ready(message.body)
            return [m.Ready(rank, generation=generation)]
        if message.kind is MessageKind.DEBUGGER:
            self._commands.offer_debugger_socket(DebuggerSocket(rank, message.fd, message.body.decode()))
            return []
        if message.kind is MessageKind.STOP_REQUESTED:
            call = self._group_of(rank).call
            return [] if call is None else [CallEvent(call, m.StopRequested(f"request_stop() in rank {rank}"))]
        if message.kind is MessageKind.COLLECTIVES:
            self._open_collectives_socket(handle, message)
            return []
        if message.kind is MessageKind.CALLED_COLLECTIVES:
            with suppress(ValueError, LookupError, TypeError):  # the rank has overwritten its own memory
                observed.add_collectives(RankCollectives.from_json(message.body))
            return []
        if message.kind is MessageKind.EXIT_BLOCKED:
            self._group_of(rank).exit_blockers[rank] = clean_line(message.body.decode(errors="replace"))
            return []
        if message.kind is MessageKind.DETAILS:
            observed.details = message.body
            return [] if self._capture_locals else [m.DetailsReceived(rank, generation=generation)]
        if message.kind is MessageKind.LOCALS:
            observed.local_variables = message.body
            return [m.DetailsReceived(rank, generation=generation)]
        if message.kind is MessageKind.FAILING:
            observed.raised_at = message.stamp
            return [m.Failing(rank, generation=generation)]
        observed.answer, observed.answer_received_at = message, monotonic()
        if message.kind is MessageKind.RETURNED:
            if self._is_multi_node:  # the rank exits when all ranks of this node have returned; others may wait for it
                self._request_collectives_of(handle)
            return [m.Returned(rank, generation=generation)]
        peer_error = classify_exception(message.body)
        is_secondary = peer_error is not None and peer_error.should_wait_for_cause
        return [m.Failed(rank, is_secondary=is_secondary, generation=generation)]

    def _on_stack_data(self, handle: RankHandle) -> list[m.Event]:
        was_complete = handle.stack_parser.is_complete()
        handle.read_stack_pipe()
        if was_complete or not handle.stack_parser.is_complete():
            return []
        self._stack_requests.add_stacks(handle)
        return self._end_dump(handle)

    def _end_dump(self, handle: RankHandle) -> list[m.Event]:
        """If the state machine waits for data of this rank, and all of this data has come, return the event StackDumped.

        The state machine does not wait for the stacks of a rank that has answered the call.
        """
        lacks_stacks = handle.observations.answer is None and handle.stack_parser.is_dump_pending()
        is_pending = handle.collective_sockets.is_pending or lacks_stacks
        if is_pending or not handle.awaits_dump or handle.observations.has_exited:
            return []
        handle.awaits_dump = False
        return [m.StackDumped(handle.observations.worker.rank, generation=handle.generation)]

    def _open_collectives_socket(self, handle: RankHandle, message: Message) -> None:
        if message.fd == -1:  # it was lost, for want of descriptors
            return
        read = partial(self._on_crash_data if message.body else self._on_collectives, handle)
        handle.collective_sockets.open(self._pool.selector, message.fd, read, is_crash_socket=bool(message.body))
        if not message.body:
            self._monitor_of(handle).start()

    def _on_collectives(self, handle: RankHandle) -> list[m.Event]:
        """Read the collectives that a rank has sent.

        A crashing rank waits until `read_crash` is called. So this method calls `read_crash` after it has read the
        collectives.
        """
        sockets, observed = handle.collective_sockets, handle.observations
        was_pending = sockets.is_pending
        answer = sockets.read_answer()
        if answer is not None and observed.wants_collectives:
            observed.add_collectives(answer)
            observed.wants_collectives = False
            observed.collectives_at = monotonic()
        if not was_pending or sockets.is_pending:
            return []
        for monitor in dict.fromkeys(self._monitors.values()):
            monitor.add(handle, answer)
        self._stack_requests.add_collectives(handle, answer)
        if sockets.is_crashing:
            handle.stack_parser.feed(sockets.read_crash())
        return self._end_dump(handle)

    def _on_crash_data(self, handle: RankHandle) -> list[m.Event]:
        """Before a crashing rank dies, ask the ranks of its group for their collectives."""
        sockets = handle.collective_sockets
        if sockets.hold_crash():
            self._request_collectives(self._group_of(handle.observations.worker.rank))
            self._call_at(monotonic() + CRASH_HOLD_SECONDS, lambda: handle.stack_parser.feed(sockets.read_crash()))
        else:
            handle.stack_parser.feed(sockets.read_crash())
        return []

    def _monitor_of(self, handle: RankHandle) -> CollectiveMonitor:
        return self._monitors[self._group_of(handle.observations.worker.rank)]

    def _request_collectives(self, group: RestartGroup) -> None:
        """Ask the ranks of a group which collectives they have called. The report shows the answers."""
        for rank in group.setups:
            handle = self._pool.handles.get(rank)
            if handle is not None and not handle.observations.has_exited:
                self._request_collectives_of(handle)

    def _request_collectives_of(self, handle: RankHandle, *, again: bool = False) -> None:
        """Ask a rank for its collectives.

        If `again` is True, also ask a rank that has already sent its collectives. The new answer also contains the
        collectives that the rank has called in the meantime.
        """
        observed = handle.observations
        if (again or observed.collectives is None) and not observed.wants_collectives:
            observed.wants_collectives = handle.collective_sockets.ask()

    def _on_exit(self, handle: RankHandle) -> list[m.Event | CallEvent]:
        """Read all data that a dead rank has sent, and then read the exit code of the rank's process."""
        observed = handle.observations
        if observed.has_exited:
            return []
        events = self._on_message(handle)
        handle.read_stack_pipe()
        if handle.collective_sockets.is_pending:
            self._on_collectives(handle)
        handle.stack_parser.feed(handle.collective_sockets.read_crash())
        self._death_clock.record_death(observed)
        observed.exit_code = handle.process.read_exit_code()
        if observed.answer is None:
            for message in self._pool.read_black_box(handle):
                events += self._handle_message(handle, message)
        self._finish_observations(handle)
        self._stack_requests.add_stacks(handle)
        self._stack_requests.add_collectives(handle, None)
        return [*events, m.Exited(observed.worker.rank, generation=handle.generation)]

    def _finish_observations(self, handle: RankHandle) -> None:
        observed, parser = handle.observations, handle.stack_parser
        self._read_slot(handle)
        self._take_stacks(handle)
        if is_crash(observed.exit_code):  # otherwise a forked child has written the stack
            observed.crash_stack = add_source_lines(parser.crash_stack, self._wall_started_at)
        observed.startup_output = parser.failed_startup_output

    def _read_slot(self, handle: RankHandle) -> None:
        handle.observations.heartbeat = self._pool.read_heartbeat(handle)
        handle.observations.stopped_step = self._pool.get_stop_memory(handle.observations.worker.rank).read_stopped_step()

    def _take_stacks(self, handle: RankHandle) -> None:
        """Store the rank's stacks, if they were dumped for the report."""
        if handle.observations.is_dump_for_report:
            handle.observations.stacks = self._format_stacks(handle)

    def _format_stacks(self, handle: RankHandle) -> str:
        return add_source_lines(cut_frames_of_mpwatch(handle.stack_parser.dump), self._wall_started_at)

    def _request_stacks(self, handle: RankHandle) -> bool:
        """Ask a rank for its stacks, if it is not already writing them. Return False if the rank cannot write stacks."""
        if handle.stack_parser.is_dump_pending():
            return True
        if not handle.request_stack_dump():
            return False
        ask_natively = partial(handle.request_native_stack_dump, handle.stack_parser.dump_count)
        self._call_at(monotonic() + NATIVE_DUMP_SECONDS, ask_natively)
        return True

    def _request_stacks_of_running_rank(self, handle: RankHandle) -> bool:
        """Ask a rank for its stacks.

        If the rank has already sent stacks for the report, store these stacks before the new request.
        """
        if handle.stack_parser.is_complete():
            self._take_stacks(handle)
            handle.observations.is_dump_for_report = False
        return self._request_stacks(handle)

    def _wake_rank(self, handle: RankHandle, observed: RankObservations) -> None:
        """Interrupt the main thread's system call in a rank that has received SIGINT or SIGTERM, but still runs.

        Python runs no signal handler while the main thread waits in a system call. A signal does not interrupt a system call
        if the signal came just before the call, or if another thread received the signal. So mpwatch sends the rank a second
        signal, which requests the rank's stacks. This signal interrupts the main thread's system call.
        """
        is_same_call = self._pool.handles.get(observed.worker.rank) is handle and handle.observations is observed
        if is_same_call and observed.answer is None and not observed.has_exited:
            self._request_stacks_of_running_rank(handle)

    def _call_at(self, due_at: float, action: Callable[[], object]) -> None:
        self._delayed_count += 1
        heapq.heappush(self._delayed_actions, (due_at, self._delayed_count, action))

    # ---- what follows: state machines, actions, changes of state

    def _handle_events(self, events: list[m.Event | CallEvent]) -> list[m.Event | CallEvent]:
        """Pass all events of one wake-up to the state machines, and then execute the machines' actions.

        Return the new events that the actions and the new stages of the state machines have caused.
        """
        now = monotonic()
        actions: list[tuple[RestartGroup, m.Action]] = []
        groups_to_check = {group: None for group in self._unfinished_groups if group.due_at <= now}
        for event in events:
            for group in self._groups_of(event):
                groups_to_check[group] = None
                actions += [(group, action) for action in self._handle_event(group, event, now)]
                self._finish_call_if_idle(group)  # a rank that has answered may exit in this wake-up
        dead_handles = [self._pool.handles[event.rank] for event in events if isinstance(event, m.Exited)]
        self._oom.add_suspects(handle.observations for handle in dead_handles if may_be_oom_kill(handle.observations))
        for group in groups_to_check:
            actions += [(group, action) for action in group.handle_deadline(now)]
        new_events: list[m.Event | CallEvent] = [
            event for group, action in actions for event in self._execute(group, action)
        ]
        for handle in dead_handles:
            self._pool.reap(handle)
        for group in groups_to_check:
            new_events += self._handle_stage_change(group)
        self._publish_state()
        return new_events

    def _groups_of(self, event: m.Event | CallEvent) -> Sequence[RestartGroup]:
        if isinstance(event, m.RankEvent):
            return (self._group_of(event.rank),)
        if not isinstance(event, CallEvent) or not self._keep_ranks:
            return list(self._unfinished_groups)
        if isinstance(event.event, m.StartCall):
            return self._find_idle_group(event.call, self._all_ranks if event.call.ranks is None else set(event.call.ranks))
        return [group for group in self._unfinished_groups if group.call is event.call]

    def _find_idle_group(self, call: PendingCall, ranks: AbstractSet[int]) -> list[RestartGroup]:
        """Return a list with one idle group that contains exactly the ranks in `ranks`.

        If no group has exactly these ranks, split or merge groups. If one of these ranks was lost or is ending, return an
        empty list.
        """
        idle = [group for group in self._unfinished_groups if group.call is None and group.machine.stage is m.RunStage.IDLE]
        needed = [group for group in idle if group.setups.keys() & ranks]
        missing = ranks - {rank for group in needed for rank in group.setups}
        if missing:
            self._refuse(call, missing)
            return []
        first, *others = needed
        for other in others:
            first.absorb(other)
            self._group_by_rank |= dict.fromkeys(first.setups, first)
            self._remove_group(other)
        return [first if first.setups.keys() == ranks else self._add_group(first.split(ranks))]

    def _refuse(self, call: PendingCall, lost: Collection[int]) -> None:
        """If the ranks are independent, refuse a call that needs lost ranks. Otherwise, do nothing.

        After a refusal, persistent_ranks.py restarts the lost ranks and makes the call again. If the ranks are not
        independent, the loss of a rank ends all other ranks soon.
        """
        if self._are_independent:
            call.ranks_to_restart = tuple(sorted(lost))
            self._commands.wake_callers()

    def _group_of(self, rank: int) -> RestartGroup:
        """Return the rank's group. On several nodes there is only one group, whose ranks may change with each start."""
        return self._group_by_rank[rank] if len(self._groups) > 1 else self._groups[0]

    def _handle_event(self, group: RestartGroup, event: m.Event | CallEvent, now: float) -> list[m.Action]:
        if isinstance(event, CallEvent):
            if isinstance(event.event, m.StartCall) and not self._start_call(group, event.call):
                return []
            event = event.event
        if isinstance(event, m.StopRequested):
            return self._request_stop(group, event, now)
        if isinstance(event, m.Abort) and self._keep_ranks and group.machine.is_call_running():
            assert group.call is not None
            group.call.lost_ranks = tuple(self._lost_ranks)
        if isinstance(event, m.Exited) and group.machine.stage is m.RunStage.IDLE:
            observed = self._pool.handles[event.rank].observations
            how = "ended" if observed.exit_code is None else format_exit(observed.exit_code)
            which = "it" if self._are_independent else "all ranks"
            text = "rank %d (pid %s) %s while it had no call; the next call restarts %s"
            self._deferred_log.warning(text, event.rank, observed.pid, how, which)
        return group.handle(event, now)

    def _request_stop(self, group: RestartGroup, event: m.StopRequested, now: float) -> list[m.Action]:
        """Pass a stop request to the state machine, or let the leader of the job handle the request.

        While a job on several nodes has a leader, this leader handles the stop requests of all nodes.
        """
        if group.call is not None and group.call.stop_request is None:
            group.call.stop_request = event
        if self._on_stop is not None and group.setups and not event.is_from_job and self._on_stop(event.cause):
            return []
        if event.is_from_job and group.call is not None and group.call.stop_request is not None:
            event = replace(event, signum=group.call.stop_request.signum)  # if this node has requested it
        actions = group.handle(event, now)
        if event.is_from_job and group.machine.stop_request is None:  # the ranks of this node have ended
            self._stop_agreements.begin(group, event.cause)
        return actions

    def _start_call(self, group: RestartGroup, call: PendingCall) -> bool:
        """Assign a call to a group, and begin new observations of the group's ranks. Return False if a rank is already lost.

        If this method returns False, `call.observations` stays empty. For persistent_ranks.py, this empty list means that a
        rank was lost.
        """
        if not group.setups:  # on several nodes, before the first round: the ranks are not known yet
            group.call = call
            return True
        handles = [self._pool.handles[rank] for rank in group.setups if rank in self._pool.handles]
        is_whole = len(handles) == len(group.setups) and all(not handle.observations.has_exited for handle in handles)
        if group.machine.stage is not m.RunStage.IDLE or not is_whole:
            alive = {handle.observations.worker.rank for handle in handles if not handle.observations.has_exited}
            self._refuse(call, group.setups.keys() - alive)
            return False
        group.call = call
        self._monitors[group].begin_call()
        if any(handle.collective_sockets.is_open for handle in handles):
            self._monitors[group].start()
        for handle in handles:
            self._pool.begin_call(handle)
            group.observed[handle.observations.worker.rank] = handle.reset_observations()
        return True

    def _execute(self, group: RestartGroup, action: m.Action) -> list[m.Event]:
        """Execute an action. Return the resulting events, for example HeartbeatRead after the action ReadHeartbeat."""
        if isinstance(action, m.StartRank):
            self._monitors[group].begin_call()
            self._pool.wait_for_helpers()
            self._start_rank(group, action.rank)
            return []
        handle = self._pool.handles[action.rank]
        observed = handle.observations
        if isinstance(action, m.CallRank):
            assert group.call is not None
            self._pool.send_call(handle, group.call.number, group.call.payload)
        elif isinstance(action, m.RequestExit):
            handle.send(MessageKind.SHUTDOWN)
        elif isinstance(action, m.DumpStacks):
            if observed.has_exited:  # in this wake-up
                return []
            observed.is_dump_for_report = True
            if not self._request_stacks(handle):
                return [m.StackDumped(action.rank, generation=handle.generation)]
            handle.awaits_dump = True
            self._request_collectives_of(handle, again=True)
        elif isinstance(action, m.RequestCollectives):
            handle.awaits_dump = True
            self._request_collectives_of(handle, again=True)
            return self._end_dump(handle)
        elif isinstance(action, m.ReadHeartbeat):
            return [
                m.HeartbeatRead(action.rank, beat_at=self._pool.read_heartbeat_time(handle), generation=handle.generation)
            ]
        elif isinstance(action, m.SendSignal):
            if action.signum != signal.SIGINT:
                handle.process.send_signal_to_group(action.signum)
            elif group.call is not None:
                self._pool.interrupt_call(handle, group.call.number)
            else:
                return []  # the call has ended in this wake-up
            if action.signum in (signal.SIGINT, signal.SIGTERM):
                self._call_at(monotonic() + WAKE_SECONDS, partial(self._wake_rank, handle, observed))
            observed.signals_sent.add(action.signum)
            observed.first_signal_at = observed.first_signal_at or monotonic()
        else:
            assert isinstance(action, m.AbandonRank)
            self._finish_observations(handle)
            self._pool.abandon(handle)
        return []

    def _handle_stage_change(self, group: RestartGroup) -> list[m.Event | CallEvent]:
        """Do the work that the new stage of a group's state machine requires, for example answer the group's call.

        If the ranks of all groups must end, return a list with an Abort event. Otherwise, return an empty list.
        """
        stage_before, outcome_before = group.known_stage, (group.known_stop_reason, group.known_signum)
        stop_request_before = group.known_stop_request
        group.read_machine()
        if group.known_stop_request is not None and stop_request_before is None:
            self._stop_agreements.begin(group, group.known_stop_request.cause)
        stage = group.known_stage
        is_new_stage = stage is not stage_before
        is_stop_beginning = outcome_before[0] is None or stage_before is m.RunStage.DUMPING_STACKS
        if group.machine.is_stop_overdue and is_stop_beginning and stage is not m.RunStage.DUMPING_STACKS:
            self._log_overdue_ranks(group)
        if (group.known_stop_reason, group.known_signum) != outcome_before or (
            is_new_stage and stage in (m.RunStage.AWAITING_DECISION, m.RunStage.FINISHED)
        ):
            self._on_outcome_change(group.machine)
        if is_new_stage and stage in (m.RunStage.AWAITING_ROOT_CAUSE, m.RunStage.DUMPING_STACKS):
            self._request_collectives(group)
        if stage is m.RunStage.IDLE:
            self._finish_call_if_idle(group)
            if self._lost_ranks:
                return [m.Abort()]
        elif self._are_independent:
            if stage is m.RunStage.FINISHED and is_new_stage:
                self._end_lost_ranks(group)
        elif self._keep_ranks and is_new_stage and stage in (m.RunStage.SHUTTING_DOWN, m.RunStage.TERMINATING):
            self._note_lost_ranks(group)
            return [m.Abort()]  # the ranks of a WorkerGroup end together
        elif stage is m.RunStage.AWAITING_DECISION and is_new_stage:
            helpers_oom = self._oom.take_other_kills()
            self._commands.request_decision(self._get_observations(group, helpers_oom))
        elif stage is m.RunStage.FINISHED and is_new_stage:
            self._unfinished_groups.remove(group)
            self._note_lost_ranks(group)
            group.log_exit_problems(self._deferred_log, of_run=group.call is not None)
            has_failed = group.machine.stop_reason is m.StopReason.FAILED
            are_others_saving = group.call is not None and group.call.stop_request is not None
            may_go_on = has_failed and (self._keep_going or are_others_saving)
            if group.machine.stop_reason is not m.StopReason.SUCCEEDED and not may_go_on:
                return [m.Abort()]
        return []

    def _log_overdue_ranks(self, group: RestartGroup) -> None:
        """Log a warning about the ranks that have not returned in time after a stop request.

        The warning shows where in the code each of these ranks is.
        """
        timeout = self._spec.stop_policy.timeout
        assert timeout is not None
        for handle in (self._pool.handles[rank] for rank in group.setups if rank in self._pool.handles):
            self._take_stacks(handle)
        self._stop_agreements.log_overdue_ranks(group, timeout)

    def _end_lost_ranks(self, group: RestartGroup) -> None:
        """Remove a group of independent ranks that have ended, and answer their call, if any. Other ranks stay alive."""
        group.log_exit_problems(self._deferred_log, of_run=group.call is not None)
        call, observations = group.call, self._get_observations(group, self._oom.take_other_kills())
        self._remove_group(group)
        self._publish_state()
        if call is not None:
            call.ended_ranks = tuple(group.setups)
            self._answer_call(group, call, observations)

    def _note_lost_ranks(self, group: RestartGroup) -> None:
        """Record which ranks of the group were lost. If this method has already recorded lost ranks, do nothing.

        If ranks of a WorkerGroup with scope="group" are lost, mpwatch also stops the calls of all other ranks. The result of
        each stopped call says that the loss of these ranks caused the stop.
        """
        if not self._lost_ranks:
            exited = [rank for rank, observed in group.observed.items() if observed.has_exited]
            self._lost_ranks = exited or sorted(group.setups)

    def _finish_call_if_idle(self, group: RestartGroup) -> None:
        """Answer the group's call if the call has ended and its ranks are idle again."""
        call = group.call
        if call is None or group.machine.stage is not m.RunStage.IDLE:
            return
        for rank in group.setups:
            handle = self._pool.handles[rank]
            self._read_slot(handle)
            self._take_stacks(handle)
        self._answer_call(group, call, self._get_observations(group, ""))
        while self._are_independent and len(group.setups) > 1:
            self._add_group(group.split([max(group.setups)]))

    def _answer_call(self, group: RestartGroup, call: PendingCall, observations: AttemptObservations) -> None:
        call.observations = [observations]
        group.call = None
        call.is_done = True
        self._commands.wake_callers()

    def _publish_state(self) -> None:
        may_lack_ranks = self._are_independent and not self._is_shutting_down
        lacks_ranks = may_lack_ranks and sum(len(group.setups) for group in self._groups) < len(self._all_ranks)
        self._commands.state = WorkerState.UNHEALTHY if lacks_ranks else state_of_all(self._groups)
        self._event_bus.change_state(self._commands.state, (worker for group in self._groups for worker in group.workers))
