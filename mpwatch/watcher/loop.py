"""The watcher itself: starts the ranks, waits once for everything, and does what the machine says. In a thread of its own.

    call, ranks started -+-> wait(pidfds, channels, stacks, signals; deadline) -+-> facts
                         |        what the system says  ->  events              |
                         `--------- actions  <-  machine  <---------------------'

Guarantees: when `carry_out` returns or raises, nothing of the run is left (see crew.py). A message is read before the death
that followed it. Nothing blocks but the one wait, and that has the machine's deadline. No code of the user's runs here.
"""

import platform
import signal
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..errors import LaunchError
from ..spec import Worker, WorkerSpec
from ..wire.messages import Kind, Message
from ..wire.payload import Payload
from ..wire.shortage import with_remedy
from ..wording import exit_text
from . import states as m
from .crew import Crew
from .diagnosis import is_crash, is_suspect
from .facts import Facts
from .gate import Gate
from .line import RankLine
from .machine import Machine
from .oom import OomWatch
from .order import Order
from .remarks import Remarks
from .signals import HostSignals
from .signatures import complaint_in
from .stacks import tidy, with_sources

__all__ = ["carry_out"]


def carry_out(
    spec: WorkerSpec[Any],
    payload: Payload,
    ranks: Iterable[tuple[Worker, dict[str, str]]],
    *,
    signals: HostSignals,
    remarks: Remarks,
    started_at: float,
) -> Facts:
    """Run these ranks, each with its environment, to their end. Raises LaunchError."""
    with OomWatch(remarks) as oom:
        with Crew(payload, remarks) as crew:
            for worker, env in ranks:
                crew.start(worker, env)
            run = _Run(spec, crew, signals, oom, started_at)
            run.until_over()
        struck = oom.judge()
    return run.facts(helpers_oom=struck)


class _Run:
    """One pass through the machine."""

    def __init__(self, spec: WorkerSpec[Any], crew: Crew, signals: HostSignals, oom: OomWatch, started_at: float) -> None:
        self.spec = spec
        self.crew = crew
        self.gate: Gate[list[m.Event]] = crew.gate
        self.signals = signals
        self.remarks = crew.remarks
        self.oom = oom
        self.lingers: dict[int, str] = {}
        self.started_at = started_at
        self._wall_time = time.time() - (time.monotonic() - started_at)  # of the start
        self.seen = {rank: line.facts for rank, line in crew.lines.items()}
        self.order = Order()
        self.machine = Machine(
            crew.lines,
            now=self.started_at,
            grace_period=spec.grace_period,
            timeout=spec.timeout,
            heartbeat_timeout=spec.heartbeat_timeout,
        )
        try:
            self.gate.add(signals.fileno(), self._interrupts)
            for line in crew.lines.values():
                line.wait_at(self.gate, partial(self._hear, line), partial(self._overhear, line), partial(self._mourn, line))
        except OSError as error:
            raise LaunchError(with_remedy("the ranks cannot be waited for", error)) from error

    def until_over(self) -> None:
        """Wait and act until no rank is left."""
        events: list[m.Event] = []
        while self.machine.stage is not m.Stage.OVER:
            deadline = self.machine.deadline
            patience = 0.0 if events else None if deadline is None else deadline - time.monotonic()
            self.order.look_again()
            for handle in self.gate.wait(patience):
                events += handle()
            events = self._step(events)
        self._warn()

    def _step(self, events: list[m.Event]) -> list[m.Event]:
        """All events of one wake-up first, then what is to be done: a death that has been seen was none of our doing.

        Returns what is known at once of what has been done.
        """
        now = time.monotonic()
        actions = [action for event in events for action in self.machine.handle(event, now)]
        self.oom.look(line.facts for line in self._died_in(events) if is_suspect(line.facts))
        known = [event for action in actions + self.machine.expire(now) for event in self._do(action)]
        for line in self._died_in(events):
            self.crew.bury(line)
        return known

    def _died_in(self, events: list[m.Event]) -> list[RankLine]:
        return [self.crew.lines[event.rank] for event in events if isinstance(event, m.Died)]

    def _do(self, action: m.Action) -> list[m.Event]:
        line = self.crew.lines[action.rank]
        if isinstance(action, m.CallRank):
            self.crew.call(line)
        elif isinstance(action, m.EndRank):
            line.send(Kind.END)
        elif isinstance(action, m.LookAt):
            has_died = line.facts.died_at is not None  # in this wake-up
            return [] if has_died or line.ask_for_stacks() else [m.Looked(action.rank)]
        elif isinstance(action, m.FeelPulse):
            return [m.Pulse(action.rank, beat_at=self.crew.beat_of(line))]
        elif isinstance(action, m.SignalRank):
            send = line.process.signal_rank if action.signum == signal.SIGINT else line.process.signal_group
            send(action.signum)
            line.facts.signals_sent.add(action.signum)
        else:
            text = "rank %d (pid %s) cannot be killed, not even by SIGKILL: left behind"
            self.remarks.warning(text, action.rank, line.facts.pid)
            self._take_leave(line)
            self.crew.abandon(line)
        return []

    def _interrupts(self) -> list[m.Event]:
        return [m.Interrupted(number) for number in self.signals.take()]

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
        line.facts.stacks = with_sources(tidy(line.stacks.stacks, line.stacks.main_thread), self._wall_time)
        if is_crash(line.facts.exit_code):  # else it was a forked child's
            line.facts.crash = with_sources(line.stacks.crash, self._wall_time)
        line.facts.printed = line.stacks.printed_instead

    def _warn(self) -> None:
        """About ranks that succeeded and yet did not end as they should."""
        for rank in self.machine.lingering:
            self.remarks.warning(
                "rank %d had returned but was still there %g s later (%s); stopped. Its value is kept",
                rank,
                self.spec.grace_period,
                self.lingers.get(rank) or "an exit hook or a finaliser that does not end",
            )
        for rank, facts in self.seen.items():
            by_us = -(facts.exit_code or 0) in facts.signals_sent
            if self.machine.verdict is m.Verdict.SUCCEEDED and facts.exit_code and not by_us:
                text = "rank %d had returned, and then %s. Its value is kept"
                self.remarks.warning(text, rank, exit_text(facts.exit_code))

    def facts(self, helpers_oom: str) -> Facts:
        """What was seen, for the diagnosis."""
        return Facts(
            ranks=self.seen,
            hostname=platform.node(),
            started_at=self.started_at,
            stopped_at=self.machine.stopped_at,
            verdict=self.machine.verdict,
            never_ready=self.machine.never_ready,
            silent=self.machine.silent,
            heartbeat_timeout=self.spec.heartbeat_timeout,
            timeout=self.spec.timeout,
            signum=self.machine.signum,
            helpers_oom=helpers_oom,
        )
