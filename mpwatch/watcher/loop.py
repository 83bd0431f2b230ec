"""The watcher itself: starts the ranks, waits once for everything, and does what the machine says. In a thread of its own.

    ranks started -+-> wait(pidfds, channels, stacks, mailbox; deadline) -+-> facts of each call
                   |        what the system says  ->  events              |
                   `--------- actions  <-  machine  <---------------------'

Guarantees: when `carry_out` returns or raises, nothing of the ranks is left (see crew.py). A message is read before the
death that followed it. Nothing blocks but the one wait, which has the machine's deadline. No code of the user's runs here.
"""

import platform
import signal
import time
from collections.abc import Iterable
from functools import partial

from ..errors import LaunchError
from ..ranks import Worker
from ..result import WorkerState
from ..spec import GroupSpec
from ..wire.messages import Kind, Message
from ..wire.shortage import with_remedy
from ..wording import exit_text
from . import states as m
from .crew import Crew
from .diagnosis import is_crash, is_suspect
from .facts import Facts
from .gate import Gate
from .line import RankLine
from .machine import Machine
from .mailbox import Errand, Mailbox
from .oom import OomWatch
from .order import Order
from .remarks import Remarks
from .signatures import complaint_in
from .stacks import tidy, with_sources

__all__ = ["carry_out"]


def carry_out(
    spec: GroupSpec,
    ranks: Iterable[tuple[Worker, dict[str, str]]],
    mailbox: Mailbox,
    remarks: Remarks,
    *,
    keep: bool,
) -> None:
    """Start these ranks, each with its environment, and watch them to their end; they stay after a call if `keep`.

    Raises LaunchError.
    """
    born_at = time.time()
    with OomWatch(remarks) as oom:
        with Crew(remarks) as crew:
            for worker, env in ranks:
                crew.start(worker, env)
            run = _Run(spec, crew, mailbox, oom, born_at=born_at, keep=keep)
            mailbox.state = WorkerState.INIT
            mailbox.alarm.ring()
            run.until_over()
        struck = oom.judge()
    run.answer(helpers_oom=struck)


class _Run:
    """One pass through the machine: a call, or one after another."""

    def __init__(self, spec: GroupSpec, crew: Crew, mailbox: Mailbox, oom: OomWatch, *, born_at: float, keep: bool) -> None:
        self.spec = spec
        self.crew = crew
        self.gate: Gate[list[m.Event]] = crew.gate
        self.mailbox = mailbox
        self.remarks = crew.remarks
        self.oom = oom
        self.lingers: dict[int, str] = {}
        self.errand: Errand | None = None
        self.seen = {rank: line.facts for rank, line in crew.lines.items()}
        self.order = Order()
        self._born_at = born_at  # by the wall clock
        self.machine = Machine(
            crew.lines,
            now=time.monotonic(),
            grace_period=spec.grace_period,
            timeout=spec.timeout,
            heartbeat_timeout=spec.heartbeat_timeout,
            keep=keep,
        )
        try:
            self.gate.add(mailbox.bell.fileno(), self._take_mail)
            for line in crew.lines.values():
                line.wait_at(self.gate, partial(self._hear, line), partial(self._overhear, line), partial(self._mourn, line))
        except OSError as error:
            raise LaunchError(with_remedy("the ranks cannot be waited for", error)) from error

    def until_over(self) -> None:
        """Wait and act until no rank is left."""
        events = self._step(self._take_mail())
        while self.machine.stage is not m.Stage.OVER:
            deadline = self.machine.deadline
            patience = 0.0 if events else None if deadline is None else deadline - time.monotonic()
            self.order.look_again()
            for handle in self.gate.wait(patience):
                events += handle()
            events = self._step(events)
        self._warn()

    def answer(self, helpers_oom: str) -> None:
        """Hand the caller what was seen of the call that the ranks have ended with, if there is one."""
        if self.errand is not None:
            self.errand.facts = self._facts(self.errand, helpers_oom)

    def _answer_and_go_on(self, errand: Errand) -> None:
        for line in self.crew.lines.values():
            line.facts.pulse = self.crew.pulse_of(line)
        errand.facts = self._facts(errand, helpers_oom="")
        errand.is_done = True
        self.errand = None
        self.mailbox.alarm.ring()

    def _step(self, events: list[m.Event]) -> list[m.Event]:
        """All events of one wake-up first, then what is to be done: a death that has been seen was none of our doing.

        Returns what is known at once of what has been done.
        """
        now = time.monotonic()
        actions = [action for event in events for action in self._handle(event, now)]
        self.oom.look(line.facts for line in self._died_in(events) if is_suspect(line.facts))
        known = [event for action in actions + self.machine.expire(now) for event in self._do(action)]
        for line in self._died_in(events):
            self.crew.bury(line)
        self._tell_state()
        if self.machine.stage is m.Stage.IDLE and self.errand is not None:
            self._answer_and_go_on(self.errand)
        return known

    def _handle(self, event: m.Event, now: float) -> list[m.Action]:
        if isinstance(event, m.CallAll) and not self._begin_call():
            return []
        if isinstance(event, m.Died) and self.machine.stage is m.Stage.IDLE:
            facts = self.crew.lines[event.rank].facts
            how = "ended" if facts.exit_code is None else exit_text(facts.exit_code)
            text = "rank %d (pid %s) %s while there was no call; the next one starts all ranks anew"
            self.remarks.warning(text, event.rank, facts.pid, how)
        return self.machine.handle(event, now)

    def _begin_call(self) -> bool:
        """False if it comes too late: a rank has been lost. The caller sees that when all have ended."""
        lines = self.crew.lines.values()
        if self.machine.stage is not m.Stage.IDLE or any(line.facts.died_at is not None for line in lines):
            return False
        self.errand = self._posted
        self.seen = {rank: line.begin_call() for rank, line in self.crew.lines.items()}
        for line in lines:
            self.crew.forget_pulse(line)
        return True

    def _tell_state(self) -> None:
        stage = self.machine.stage
        if stage not in (m.Stage.IDLE, m.Stage.WORKING, m.Stage.LAST_CALL):
            self.mailbox.state = WorkerState.UNHEALTHY
        elif self.mailbox.state is not WorkerState.HEALTHY and m.Phase.STARTING not in self.machine.phases.values():
            self.mailbox.state = WorkerState.HEALTHY

    def _died_in(self, events: list[m.Event]) -> list[RankLine]:
        return [self.crew.lines[event.rank] for event in events if isinstance(event, m.Died)]

    def _do(self, action: m.Action) -> list[m.Event]:
        line = self.crew.lines[action.rank]
        if isinstance(action, m.CallRank):
            assert self.errand is not None
            self.crew.call(line, self.errand.payload)
        elif isinstance(action, m.EndRank):
            line.send(Kind.END)
        elif isinstance(action, m.LookAt):
            has_died = line.facts.died_at is not None  # in this wake-up
            return [] if has_died or line.ask_for_stacks() else [m.Looked(action.rank)]
        elif isinstance(action, m.FeelPulse):
            return [m.Pulse(action.rank, beat_at=self.crew.beat_of(line))]
        elif isinstance(action, m.SignalRank):
            if action.signum == signal.SIGINT:
                self.crew.interrupt(line)
            else:
                line.process.signal_group(action.signum)
            line.facts.signals_sent.add(action.signum)
        else:
            text = "rank %d (pid %s) cannot be killed, not even by SIGKILL: left behind"
            self.remarks.warning(text, action.rank, line.facts.pid)
            self._take_leave(line)
            self.crew.abandon(line)
        return []

    def _take_mail(self) -> list[m.Event]:
        events: list[m.Event] = []
        for thing in self.mailbox.take():
            if isinstance(thing, Errand):
                self._posted = thing
                events.append(m.CallAll(thing.started_at))
            else:
                events.append(thing)
        return events

    def _hear(self, line: RankLine) -> list[m.Event]:
        events = []
        for message in line.read():
            if message.kind is Kind.FAILING:
                self.order.hear(message.stamp)
            events += self._understand(line, message)
        return events

    def _overhear(self, line: RankLine) -> list[m.Event]:
        had_all = line.stacks.is_whole()
        line.overhear()
        return [m.Looked(line.facts.worker.rank)] if line.stacks.is_whole() and not had_all else []

    def _understand(self, line: RankLine, message: Message) -> list[m.Event]:
        rank, facts = line.facts.worker.rank, line.facts
        if message.kind is Kind.READY:
            line.becomes_ready(message.body)
            return [m.Ready(rank)]
        if message.kind is Kind.LINGERS:
            self.lingers[rank] = message.body.decode()
        elif message.kind is Kind.DETAILS:
            facts.details = message.body
            return [m.Told(rank)]
        elif message.kind is Kind.FAILING:
            facts.failing_at = message.stamp
            return [m.Failing(rank)]
        else:
            facts.report, facts.heard_at = message, time.monotonic()
            if message.kind is Kind.RETURNED:
                return [m.Returned(rank)]
            complaint = complaint_in(message.body)
            return [m.Failed(rank, is_secondary=complaint is not None and complaint.is_worth_waiting)]
        return []

    def _mourn(self, line: RankLine) -> list[m.Event]:
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
        return [*events, m.Died(line.facts.worker.rank)]

    def _take_leave(self, line: RankLine) -> None:
        line.facts.pulse = self.crew.pulse_of(line)
        line.facts.stacks = with_sources(tidy(line.stacks.stacks, line.stacks.main_thread), self._born_at)
        if is_crash(line.facts.exit_code):  # else it was a forked child's
            line.facts.crash = with_sources(line.stacks.crash, self._born_at)
        line.facts.printed = line.stacks.printed_instead

    def _warn(self) -> None:
        """About ranks that succeeded and yet did not end as they should."""
        is_run = self.errand is not None
        so_far, kept = ("had returned", ". Its value is kept") if is_run else ("was told to end", "")
        for rank in self.machine.lingering:
            self.remarks.warning(
                f"rank %d {so_far} but was still there %g s later (%s); stopped{kept}",
                rank,
                self.spec.grace_period,
                self.lingers.get(rank) or "an exit hook or a finaliser that does not end",
            )
        for rank, facts in self.seen.items():
            by_us = -(facts.exit_code or 0) in facts.signals_sent
            if self.machine.verdict is m.Verdict.SUCCEEDED and facts.exit_code and not by_us:
                self.remarks.warning(f"rank %d {so_far}, and then %s{kept}", rank, exit_text(facts.exit_code))

    def _facts(self, errand: Errand, helpers_oom: str) -> Facts:
        return Facts(
            ranks=self.seen,
            hostname=platform.node(),
            started_at=errand.started_at,
            stopped_at=self.machine.stopped_at,
            verdict=self.machine.verdict,
            never_ready=self.machine.never_ready,
            silent=self.machine.silent,
            heartbeat_timeout=self.spec.heartbeat_timeout,
            timeout=self.spec.timeout,
            signum=self.machine.signum,
            helpers_oom=helpers_oom,
        )
