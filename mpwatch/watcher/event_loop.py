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
        places: list[RankSetup],
        mailbox: CommandQueue,
        remarks: DeferredLog,
        journal: EventBus,
        *,
        output: RankOutput,
        keep: bool,
        herald: VerdictCallback,
    ) -> None:
        boats = [places] if spec.policy.scope == "group" else [[place] for place in places]
        self.units = [RestartGroup(spec, boat, journal, keep=keep) for boat in boats]
        self.unit_of = {rank: unit for unit in self.units for rank in unit.places}
        self.open_units = list(self.units)  # that are not over
        self.crew = ProcessPool(remarks, output)
        self.mailbox = mailbox
        self.journal = journal
        self.remarks = remarks
        self.oom = OomDetector(remarks)
        self.herald = herald
        self.errand: PendingCall | None = None
        self.order = DeathClock()
        self._born_at = time.time()

    def run(self) -> None:
        """Start the ranks, and wait and act until none is left. Raises LaunchError."""
        with self.oom:
            with self.crew:
                self._start()
                self._run_until_over()
            helpers_oom = self.oom.judge()
        if self.errand is not None:  # the ranks have ended with this call
            self.errand.facts = [self._facts(unit, helpers_oom) for unit in self.units]

    @property
    def gate(self) -> Selector[list[m.Event]]:
        """The descriptors that are waited for."""
        return self.crew.gate

    def _start(self) -> None:
        for unit in self.units:
            for rank in unit.places:
                self._start_rank(unit, rank)
        self._tell_state()
        self.mailbox.alarm.ring()
        try:
            self.gate.add(self.mailbox.bell.fileno(), self._take_mail)
        except OSError as error:
            raise LaunchError(with_remedy("the ranks cannot be waited for", error)) from error

    def _run_until_over(self) -> None:
        events = self._step(self._take_mail())
        while self.open_units:
            deadline = min(unit.due_at for unit in self.open_units)
            patience = 0.0 if events else None if deadline == math.inf else deadline - time.monotonic()
            self.order.look_again()
            for handle in self.gate.wait(patience):
                events += handle()
            events = self._step(events)

    def _start_rank(self, unit: RestartGroup, rank: int) -> None:
        worker, env = unit.places[rank]
        line = self.crew.start(worker, env)
        line.generation = unit.machine.generation
        unit.seen[rank] = line.facts
        self.journal.note(WorkerStarted, [rank], attempt=worker.restart_count, pid=line.facts.pid)
        try:
            line.wait_at(self.gate, partial(self._hear, line), partial(self._overhear, line), partial(self._mourn, line))
        except OSError as error:
            raise LaunchError(with_remedy("the ranks cannot be waited for", error)) from error

    def _answer_and_go_on(self, errand: PendingCall, unit: RestartGroup) -> None:
        for line in self.crew.lines.values():
            line.facts.pulse = self.crew.pulse_of(line)
        errand.facts = [self._facts(unit, helpers_oom="")]
        errand.is_done = True
        self.errand = None
        self.mailbox.alarm.ring()

    def _step(self, events: list[m.Event]) -> list[m.Event]:
        """All events of one wake-up first, then what is to be done: a death that has been seen was none of our doing.

        Returns what is known at once of what has been done.
        """
        now = time.monotonic()
        to_do: list[tuple[RestartGroup, m.Action]] = []
        touched = {unit: None for unit in self.open_units if unit.due_at <= now}
        for event in events:
            for unit in self._concerned(event):
                touched[unit] = None
                to_do += [(unit, action) for action in self._handle(unit, event, now)]
        self.oom.look(line.facts for line in self._died_in(events) if may_be_oom_kill(line.facts))
        for unit in touched:
            to_do += [(unit, action) for action in unit.expire(now)]
        known = [event for unit, action in to_do for event in self._do(unit, action)]
        for line in self._died_in(events):
            self.crew.bury(line)
        for unit in touched:
            known += self._look_at(unit)
        self._tell_state()
        return known

    def _concerned(self, event: m.Event) -> Sequence[RestartGroup]:
        return (self._unit_of(event),) if isinstance(event, m.RankEvent) else list(self.open_units)

    def _unit_of(self, event: m.RankEvent) -> RestartGroup:
        """Of several nodes the ranks are not known before they are started; there is one unit then."""
        return self.unit_of[event.rank] if len(self.units) > 1 else self.units[0]

    def _handle(self, unit: RestartGroup, event: m.Event, now: float) -> list[m.Action]:
        if isinstance(event, m.StartCall) and not self._begin_call(unit):
            return []
        if isinstance(event, m.Exited) and unit.machine.stage is m.RunStage.IDLE:
            facts = self.crew.lines[event.rank].facts
            how = "ended" if facts.exit_code is None else exit_text(facts.exit_code)
            text = "rank %d (pid %s) %s while there was no call; the next one starts all ranks anew"
            self.remarks.warning(text, event.rank, facts.pid, how)
        return unit.handle(event, now)

    def _begin_call(self, unit: RestartGroup) -> bool:
        """False if it comes too late: a rank has been lost. The caller sees that when all have ended."""
        if not unit.places:  # who they are is not known yet
            self.errand = self._posted
            return True
        lines = [self.crew.lines[rank] for rank in unit.places if rank in self.crew.lines]
        is_whole = len(lines) == len(unit.places) and all(line.facts.died_at is None for line in lines)
        if unit.machine.stage is not m.RunStage.IDLE or not is_whole:
            return False
        self.errand = self._posted
        for line in lines:
            unit.seen[line.facts.worker.rank] = line.begin_call()
            self.crew.forget_pulse(line)
        return True

    def _look_at(self, unit: RestartGroup) -> list[m.Event]:
        """What follows from where its machine has come to."""
        before, verdict = unit.stage, unit.verdict
        unit.look_at_machine()
        if unit.verdict is not verdict or (
            unit.stage is not before and unit.stage in (m.RunStage.AWAITING_DECISION, m.RunStage.FINISHED)
        ):
            self.herald(unit.machine)
        if unit.stage is m.RunStage.IDLE and self.errand is not None:
            self._answer_and_go_on(self.errand, unit)
        elif unit.stage is m.RunStage.AWAITING_DECISION and before is not m.RunStage.AWAITING_DECISION:
            self.mailbox.ask(self._facts(unit, self.oom.judge()))
        elif unit.stage is m.RunStage.FINISHED and before is not m.RunStage.FINISHED:
            self.open_units.remove(unit)
            unit.warn(self.remarks, of_run=self.errand is not None)
            if unit.machine.verdict is not m.StopReason.SUCCEEDED:
                return [m.Abort()]
        return []

    def _tell_state(self) -> None:
        self.mailbox.state = state_of_all(self.units)
        self.journal.change_state(self.mailbox.state, (worker for unit in self.units for worker in unit.workers))

    def _died_in(self, events: list[m.Event]) -> list[RankHandle]:
        return [self.crew.lines[event.rank] for event in events if isinstance(event, m.Exited)]

    def _do(self, unit: RestartGroup, action: m.Action) -> list[m.Event]:
        if isinstance(action, m.StartRank):
            self.crew.await_helpers()
            self._start_rank(unit, action.rank)
            return []
        line = self.crew.lines[action.rank]
        if isinstance(action, m.CallRank):
            assert self.errand is not None
            self.crew.call(line, self.errand.payload)
        elif isinstance(action, m.RequestExit):
            line.send(MessageKind.SHUTDOWN)
        elif isinstance(action, m.DumpStacks):
            has_died = line.facts.died_at is not None  # in this wake-up
            return [] if has_died or line.ask_for_stacks() else [m.StackDumped(action.rank, generation=line.generation)]
        elif isinstance(action, m.ReadHeartbeat):
            return [m.HeartbeatRead(action.rank, beat_at=self.crew.beat_of(line), generation=line.generation)]
        elif isinstance(action, m.SendSignal):
            if action.signum == signal.SIGINT:
                self.crew.interrupt(line)
            else:
                line.process.signal_group(action.signum)
            line.facts.signals_sent.add(action.signum)
            line.facts.signalled_at = line.facts.signalled_at or time.monotonic()
        else:
            text = "rank %d (pid %s) cannot be killed, not even by SIGKILL: left behind"
            self.remarks.warning(text, action.rank, line.facts.pid)
            self._take_leave(line)
            self.crew.abandon(line)
        return []

    def _take_mail(self) -> list[m.Event]:
        events: list[m.Event] = []
        for thing in self.mailbox.take():
            if isinstance(thing, PendingCall):
                self._posted = thing
                events.append(m.StartCall(thing.started_at, thing.timeout))
            elif isinstance(thing, StatusRequest):
                thing.statuses = statuses_of(self.units, self.crew)
                self.mailbox.alarm.ring()
            elif isinstance(thing, TerminalRestore):
                self.crew.guardian.entrust(thing.what)
            elif isinstance(thing, RestartCommand):
                self._renew(self._unit_of(thing.event), thing.places)
                events.append(thing.event)
            else:
                events.append(thing)
        return events

    def _hear(self, line: RankHandle) -> list[m.Event]:
        events = []
        for message in line.read():
            if message.kind is MessageKind.FAILING:
                self.order.hear(message.stamp)
            events += self._understand(line, message)
        return events

    def _renew(self, unit: RestartGroup, places: list[RankSetup]) -> None:
        """Its ranks, which are started again; in a job of several nodes they may be others."""
        unit.places = {worker.rank: (worker, env) for worker, env in places}
        self.unit_of = {rank: unit for unit in self.units for rank in unit.places}

    def _overhear(self, line: RankHandle) -> list[m.Event]:
        had_all = line.stacks.is_whole()
        line.overhear()
        rank, has_all = line.facts.worker.rank, line.stacks.is_whole()
        return [m.StackDumped(rank, generation=line.generation)] if has_all and not had_all else []

    def _understand(self, line: RankHandle, message: Message) -> list[m.Event]:
        rank, facts, life = line.facts.worker.rank, line.facts, line.generation
        if message.kind is MessageKind.READY:
            line.becomes_ready(message.body)
            return [m.Ready(rank, generation=life)]
        if message.kind is MessageKind.EXIT_BLOCKED:
            self.unit_of[rank].lingers[rank] = message.body.decode()
        elif message.kind is MessageKind.DETAILS:
            facts.details = message.body
            return [m.DetailsReceived(rank, generation=life)]
        elif message.kind is MessageKind.FAILING:
            facts.failing_at = message.stamp
            return [m.Failing(rank, generation=life)]
        else:
            facts.report, facts.heard_at = message, time.monotonic()
            if message.kind is MessageKind.RETURNED:
                return [m.Returned(rank, generation=life)]
            complaint = complaint_in(message.body)
            is_secondary = complaint is not None and complaint.is_worth_waiting
            return [m.Failed(rank, is_secondary=is_secondary, generation=life)]
        return []

    def _mourn(self, line: RankHandle) -> list[m.Event]:
        """A rank has ended. What it had sent comes first; what it could not send is in its black box."""
        if line.facts.died_at is not None:
            return []
        events = self._hear(line)
        line.overhear()
        self.order.die(line.facts)
        code = line.process.poll()
        line.facts.exit_code = code if line.process.exit_is_known() else None
        if line.facts.report is None:
            for message in self.crew.answer_left(line):
                events += self._understand(line, message)
        self._take_leave(line)
        return [*events, m.Exited(line.facts.worker.rank, generation=line.generation)]

    def _take_leave(self, line: RankHandle) -> None:
        line.facts.pulse = self.crew.pulse_of(line)
        line.facts.stacks = with_sources(tidy(line.stacks.stacks, line.stacks.main_thread), self._born_at)
        if is_crash(line.facts.exit_code):  # else it was a forked child's
            line.facts.crash = with_sources(line.stacks.crash, self._born_at)
        line.facts.printed = line.stacks.printed_instead

    def _facts(self, unit: RestartGroup, helpers_oom: str) -> AttemptObservations:
        return unit.facts(hostname=platform.node(), helpers_oom=helpers_oom)
