"""The watcher itself: starts the ranks, waits once for everything, and does what the machine says. In a thread of its own.

    ranks started -+-> wait(pidfds, channels, stacks, mailbox; deadline) -+-> facts of each call
                   |        what the system says  ->  events              |
                   `--------- actions  <-  machine  <---------------------'

Guarantees: when `EventLoop.run` returns or raises, nothing of the ranks is left (see crew.py). A message is read before the
death that followed it. Nothing blocks but the one wait, which has the machine's deadline; and, before ranks are started
again, that for what they had started, which has been killed, and has KILL_SECONDS to go. No code of the user's runs here.
"""

import math
import platform
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from mpwatch.errors import LaunchError
from mpwatch.events.types import WorkerStarted
from mpwatch.options.spec import GroupSpec
from mpwatch.results.report import exit_text
from mpwatch.watcher.commands import CommandQueue, PendingCall, RestartCommand, StatusRequest, TerminalRestore
from mpwatch.watcher.diagnosis.death_order import DeathClock
from mpwatch.watcher.diagnosis.failures import is_crash, may_be_oom_kill
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.diagnosis.oom import OomDetector
from mpwatch.watcher.diagnosis.peer_errors import complaint_in
from mpwatch.watcher.diagnosis.stack_dumps import tidy, with_sources
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.status_snapshot import statuses_of
from mpwatch.watcher.output.rank_output import RankOutput
from mpwatch.watcher.processes.process_pool import ProcessPool
from mpwatch.watcher.processes.rank_handle import RankHandle
from mpwatch.watcher.processes.selector import Selector
from mpwatch.watcher.restarts.restart_group import RankSetup, RestartGroup, state_of_all
from mpwatch.wire.messages import Message, MessageKind
from mpwatch.wire.resource_errors import with_remedy

VerdictCallback = Callable[[StateMachine], object]


class EventLoop:
    """Starts the ranks and watches them until none is left.

    Args:
        spec: options of the run or the WorkerGroup.
        places: the ranks, each with its environment.
        mailbox: what the caller wants, and what it is answered.
        remarks: log records, which the caller's thread emits.
        journal: events, which the caller's thread hands to the observers.
        output: where stdout and stderr of the ranks go.
        keep: True: the ranks stay after a call, for the next call.
        herald: called in this thread as soon as it is clear how an attempt ends, and when the last attempt has ended.
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
        keep: bool,
        on_verdict: VerdictCallback,
    ) -> None:
        setups_of_groups = [setups] if spec.policy.scope == "group" else [[setup] for setup in setups]
        self.groups = [RestartGroup(spec, setups, event_bus, keep=keep) for setups in setups_of_groups]
        self.group_of = {rank: group for group in self.groups for rank in group.setups}
        self.open_groups = list(self.groups)  # that are not over
        self.pool = ProcessPool(deferred_log, output)
        self.commands = commands
        self.event_bus = event_bus
        self.deferred_log = deferred_log
        self.oom = OomDetector(deferred_log)
        self.on_verdict = on_verdict
        self.pending_call: PendingCall | None = None
        self.death_clock = DeathClock()
        self._born_at = time.time()

    def run(self) -> None:
        """Start the ranks, and wait and act until none is left. Raises LaunchError."""
        with self.oom:
            with self.pool:
                self._start()
                self._run_until_over()
            helpers_oom = self.oom.judge()
        if self.pending_call is not None:  # the ranks have ended with this call
            self.pending_call.observations = [self._observe(group, helpers_oom) for group in self.groups]

    @property
    def selector(self) -> Selector[list[m.Event]]:
        """The descriptors that are waited for."""
        return self.pool.selector

    def _start(self) -> None:
        for group in self.groups:
            for rank in group.setups:
                self._start_rank(group, rank)
        self._publish_state()
        self.commands.caller_wakeup.wake()
        try:
            self.selector.add(self.commands.watcher_wakeup.fileno(), self._take_commands)
        except OSError as error:
            raise LaunchError(with_remedy("the ranks cannot be waited for", error)) from error

    def _run_until_over(self) -> None:
        events = self._step(self._take_commands())
        while self.open_groups:
            deadline = min(group.due_at for group in self.open_groups)
            patience = 0.0 if events else None if deadline == math.inf else deadline - time.monotonic()
            self.death_clock.look_again()
            for handle in self.selector.wait(patience):
                events += handle()
            events = self._step(events)

    def _start_rank(self, group: RestartGroup, rank: int) -> None:
        worker, env = group.setups[rank]
        handle = self.pool.start(worker, env)
        handle.generation = group.machine.generation
        group.observed[rank] = handle.observations
        self.event_bus.publish(WorkerStarted, [rank], attempt=worker.restart_count, pid=handle.observations.pid)
        try:
            handle.wait_at(
                self.selector,
                partial(self._on_message, handle),
                partial(self._on_stack_data, handle),
                partial(self._on_exit, handle),
            )
        except OSError as error:
            raise LaunchError(with_remedy("the ranks cannot be waited for", error)) from error

    def _answer_and_go_on(self, pending_call: PendingCall, group: RestartGroup) -> None:
        for handle in self.pool.handles.values():
            handle.observations.heartbeat = self.pool.pulse_of(handle)
        pending_call.observations = [self._observe(group, helpers_oom="")]
        pending_call.is_done = True
        self.pending_call = None
        self.commands.caller_wakeup.wake()

    def _step(self, events: list[m.Event]) -> list[m.Event]:
        """All events of one wake-up first, then what is to be done: a death that has been seen was none of our doing.

        Returns what is known at once of what has been done.
        """
        now = time.monotonic()
        to_do: list[tuple[RestartGroup, m.Action]] = []
        touched = {group: None for group in self.open_groups if group.due_at <= now}
        for event in events:
            for group in self._concerned(event):
                touched[group] = None
                to_do += [(group, action) for action in self._handle(group, event, now)]
        self.oom.look(handle.observations for handle in self._died_in(events) if may_be_oom_kill(handle.observations))
        for group in touched:
            to_do += [(group, action) for action in group.expire(now)]
        known = [event for group, action in to_do for event in self._do(group, action)]
        for handle in self._died_in(events):
            self.pool.reap(handle)
        for group in touched:
            known += self._look_at(group)
        self._publish_state()
        return known

    def _concerned(self, event: m.Event) -> Sequence[RestartGroup]:
        return (self._group_of(event),) if isinstance(event, m.RankEvent) else list(self.open_groups)

    def _group_of(self, event: m.RankEvent) -> RestartGroup:
        """Of several nodes the ranks are not known before they are started; there is one unit then."""
        return self.group_of[event.rank] if len(self.groups) > 1 else self.groups[0]

    def _handle(self, group: RestartGroup, event: m.Event, now: float) -> list[m.Action]:
        if isinstance(event, m.StartCall) and not self._begin_call(group):
            return []
        if isinstance(event, m.Exited) and group.machine.stage is m.RunStage.IDLE:
            observations = self.pool.handles[event.rank].observations
            how = "ended" if observations.exit_code is None else exit_text(observations.exit_code)
            text = "rank %d (pid %s) %s while there was no call; the next one starts all ranks anew"
            self.deferred_log.warning(text, event.rank, observations.pid, how)
        return group.handle(event, now)

    def _begin_call(self, group: RestartGroup) -> bool:
        """False if it comes too late: a rank has been lost. The caller sees that when all have ended."""
        if not group.setups:  # who they are is not known yet
            self.pending_call = self._posted
            return True
        handles = [self.pool.handles[rank] for rank in group.setups if rank in self.pool.handles]
        is_whole = len(handles) == len(group.setups) and all(handle.observations.died_at is None for handle in handles)
        if group.machine.stage is not m.RunStage.IDLE or not is_whole:
            return False
        self.pending_call = self._posted
        for handle in handles:
            group.observed[handle.observations.worker.rank] = handle.begin_call()
            self.pool.forget_pulse(handle)
        return True

    def _look_at(self, group: RestartGroup) -> list[m.Event]:
        """What follows from where its machine has come to."""
        before, verdict = group.stage, group.verdict
        group.look_at_machine()
        if group.verdict is not verdict or (
            group.stage is not before and group.stage in (m.RunStage.AWAITING_DECISION, m.RunStage.FINISHED)
        ):
            self.on_verdict(group.machine)
        if group.stage is m.RunStage.IDLE and self.pending_call is not None:
            self._answer_and_go_on(self.pending_call, group)
        elif group.stage is m.RunStage.AWAITING_DECISION and before is not m.RunStage.AWAITING_DECISION:
            self.commands.ask(self._observe(group, self.oom.judge()))
        elif group.stage is m.RunStage.FINISHED and before is not m.RunStage.FINISHED:
            self.open_groups.remove(group)
            group.warn(self.deferred_log, of_run=self.pending_call is not None)
            if group.machine.verdict is not m.StopReason.SUCCEEDED:
                return [m.Abort()]
        return []

    def _publish_state(self) -> None:
        self.commands.state = state_of_all(self.groups)
        self.event_bus.change_state(self.commands.state, (worker for group in self.groups for worker in group.workers))

    def _died_in(self, events: list[m.Event]) -> list[RankHandle]:
        return [self.pool.handles[event.rank] for event in events if isinstance(event, m.Exited)]

    def _do(self, group: RestartGroup, action: m.Action) -> list[m.Event]:
        if isinstance(action, m.StartRank):
            self.pool.await_helpers()
            self._start_rank(group, action.rank)
            return []
        handle = self.pool.handles[action.rank]
        if isinstance(action, m.CallRank):
            assert self.pending_call is not None
            self.pool.call(handle, self.pending_call.payload)
        elif isinstance(action, m.RequestExit):
            handle.send(MessageKind.SHUTDOWN)
        elif isinstance(action, m.DumpStacks):
            has_died = handle.observations.died_at is not None  # in this wake-up
            return [] if has_died or handle.ask_for_stacks() else [m.StackDumped(action.rank, generation=handle.generation)]
        elif isinstance(action, m.ReadHeartbeat):
            return [m.HeartbeatRead(action.rank, beat_at=self.pool.beat_of(handle), generation=handle.generation)]
        elif isinstance(action, m.SendSignal):
            if action.signum == signal.SIGINT:
                self.pool.interrupt(handle)
            else:
                handle.process.signal_group(action.signum)
            handle.observations.signals_sent.add(action.signum)
            handle.observations.signalled_at = handle.observations.signalled_at or time.monotonic()
        else:
            text = "rank %d (pid %s) cannot be killed, not even by SIGKILL: left behind"
            self.deferred_log.warning(text, action.rank, handle.observations.pid)
            self._finish_observations(handle)
            self.pool.abandon(handle)
        return []

    def _take_commands(self) -> list[m.Event]:
        events: list[m.Event] = []
        for thing in self.commands.take():
            if isinstance(thing, PendingCall):
                self._posted = thing
                events.append(m.StartCall(thing.started_at, thing.timeout))
            elif isinstance(thing, StatusRequest):
                thing.statuses = statuses_of(self.groups, self.pool)
                self.commands.caller_wakeup.wake()
            elif isinstance(thing, TerminalRestore):
                self.pool.guardian.entrust(thing.what)
            elif isinstance(thing, RestartCommand):
                self._renew(self._group_of(thing.event), thing.setups)
                events.append(thing.event)
            else:
                events.append(thing)
        return events

    def _on_message(self, handle: RankHandle) -> list[m.Event]:
        events = []
        for message in handle.read():
            if message.kind is MessageKind.FAILING:
                self.death_clock.hear(message.stamp)
            events += self._handle_message(handle, message)
        return events

    def _renew(self, group: RestartGroup, setups: list[RankSetup]) -> None:
        """Its ranks, which are started again; in a job of several nodes they may be others."""
        group.setups = {worker.rank: (worker, env) for worker, env in setups}
        self.group_of = {rank: group for group in self.groups for rank in group.setups}

    def _on_stack_data(self, handle: RankHandle) -> list[m.Event]:
        had_all = handle.stacks.is_whole()
        handle.read_stack_pipe()
        rank, has_all = handle.observations.worker.rank, handle.stacks.is_whole()
        return [m.StackDumped(rank, generation=handle.generation)] if has_all and not had_all else []

    def _handle_message(self, handle: RankHandle, message: Message) -> list[m.Event]:
        rank, observations, generation = handle.observations.worker.rank, handle.observations, handle.generation
        if message.kind is MessageKind.READY:
            handle.becomes_ready(message.body)
            return [m.Ready(rank, generation=generation)]
        if message.kind is MessageKind.EXIT_BLOCKED:
            self.group_of[rank].lingers[rank] = message.body.decode()
        elif message.kind is MessageKind.DETAILS:
            observations.details = message.body
            return [m.DetailsReceived(rank, generation=generation)]
        elif message.kind is MessageKind.FAILING:
            observations.failing_at = message.stamp
            return [m.Failing(rank, generation=generation)]
        else:
            observations.report, observations.heard_at = message, time.monotonic()
            if message.kind is MessageKind.RETURNED:
                return [m.Returned(rank, generation=generation)]
            complaint = complaint_in(message.body)
            is_secondary = complaint is not None and complaint.is_worth_waiting
            return [m.Failed(rank, is_secondary=is_secondary, generation=generation)]
        return []

    def _on_exit(self, handle: RankHandle) -> list[m.Event]:
        """A rank has ended. What it had sent comes first; what it could not send is in its black box."""
        if handle.observations.died_at is not None:
            return []
        events = self._on_message(handle)
        handle.read_stack_pipe()
        self.death_clock.die(handle.observations)
        code = handle.process.poll()
        handle.observations.exit_code = code if handle.process.exit_is_known() else None
        if handle.observations.report is None:
            for message in self.pool.read_black_box(handle):
                events += self._handle_message(handle, message)
        self._finish_observations(handle)
        return [*events, m.Exited(handle.observations.worker.rank, generation=handle.generation)]

    def _finish_observations(self, handle: RankHandle) -> None:
        handle.observations.heartbeat = self.pool.pulse_of(handle)
        handle.observations.stacks = with_sources(tidy(handle.stacks.stacks, handle.stacks.main_thread), self._born_at)
        if is_crash(handle.observations.exit_code):  # else it was a forked child's
            handle.observations.crash = with_sources(handle.stacks.crash, self._born_at)
        handle.observations.printed = handle.stacks.printed_instead

    def _observe(self, group: RestartGroup, helpers_oom: str) -> AttemptObservations:
        return group.observations(hostname=platform.node(), helpers_oom=helpers_oom)
