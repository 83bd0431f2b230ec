"""The watcher itself: starts the ranks, waits once for everything, and does what the machine says.

    spec -> payload -> ranks started -+-> wait(pidfds, channels, signals; next deadline) -+-> facts -> result
                                      |        what the system says  ->  events           |
                                      `--------- actions  <-  machine  <------------------'

Guarantees: when `watch` returns or raises, nothing of the run is left (see crew.py). A message is read before the death
that followed it. Nothing blocks but the one wait, and that has the machine's deadline. No thread is started.
"""

import logging
import platform
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import wait
from typing import Any, TypeVar

from ..report import exit_text
from ..result import RunResult
from ..spec import WorkerSpec
from ..wire.messages import Kind, Message
from . import machine as m
from .crew import Crew, RankLine
from .diagnosis import Facts, diagnose, is_secondary
from .environment import environments_of, reserve_port
from .sending import pack_call
from .signals import HostSignals

__all__ = ["InterruptError", "watch"]

T = TypeVar("T")
LONGEST_WAIT = 86_400.0  # poll(2) takes milliseconds in an int, and refuses more than 24 days

log = logging.getLogger("mpwatch")


class InterruptError(Exception):
    """Signals to this process came during the run. All is cleaned up; they have yet to do what they would have done."""

    def __init__(self, signals: HostSignals, result: RunResult[Any]) -> None:
        super().__init__(signals, result)
        self.signals = signals
        self.result = result


def watch(spec: WorkerSpec[T]) -> RunResult[T]:
    """Run it to its end. Raises LaunchError, or InterruptError."""
    assert isinstance(spec.nprocs, int)  # whatever the caller gave, see WorkerSpec
    started_at = time.monotonic()
    with ExitStack() as stack:
        payload = pack_call(spec)
        stack.callback(payload.close)
        keeper = stack.enter_context(reserve_port())
        # the caller's `env` function runs here, while Ctrl-C is still its own
        ranks = environments_of(spec, spec.nprocs, keeper.getsockname()[1])
        signals = HostSignals()
        with signals, Crew(payload) as crew:
            for worker, env in ranks:
                crew.start(worker, env)
            run = _Run(spec, crew, signals, started_at)
            run.until_over()
    result = diagnose(run.facts())
    if signals.received:
        raise InterruptError(signals, result)
    return result


class _Run:
    """One pass through the machine."""

    def __init__(self, spec: WorkerSpec[Any], crew: Crew, signals: HostSignals, started_at: float) -> None:
        self.spec = spec
        self.crew = crew
        self.signals = signals
        self.lingers: dict[int, str] = {}
        self.started_at = started_at
        self.seen = {rank: line.facts for rank, line in crew.lines.items()}
        self.machine = m.Machine(crew.lines, now=self.started_at, grace_period=spec.grace_period, timeout=spec.timeout)

    def until_over(self) -> None:
        """Wait and act until no rank is left."""
        while self.machine.stage is not m.Stage.OVER:
            sources = self._sources()
            deadline = self.machine.deadline
            patience = LONGEST_WAIT if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT)
            ready = set(wait(list(sources), patience))
            events = [event for fd, handle in sources.items() if fd in ready for event in handle()]
            self._step(events)
        self._warn()

    def _sources(self) -> dict[int, Callable[[], list[m.Event]]]:
        sources: dict[int, Callable[[], list[m.Event]]] = {self.signals.fileno(): self._interrupts}
        for line in self.crew.lines.values():
            if line.is_open:
                sources[line.channel.fileno()] = partial(self._hear, line)
            sources[line.process.child.sentinel] = partial(self._mourn, line)
        return sources

    def _step(self, events: list[m.Event]) -> None:
        """All events of one wake-up first, then what is to be done: a death that has been seen was none of our doing."""
        now = time.monotonic()
        actions = [action for event in events for action in self.machine.handle(event, now)]
        for action in actions + self.machine.expire(now):
            self._do(action)
        for event in events:
            if isinstance(event, m.Died):
                self.crew.bury(self.crew.lines[event.rank])

    def _do(self, action: m.Action) -> None:
        line = self.crew.lines[action.rank]
        if isinstance(action, m.CallRank):
            self.crew.call(line)
        elif isinstance(action, m.EndRank):
            line.send(Kind.END)
        elif isinstance(action, m.SignalRank):
            if action.signum == signal.SIGINT:
                line.process.interrupt()
            else:
                line.process.signal_group(action.signum)
            line.facts.signals_sent.add(action.signum)
        else:
            log.warning("rank %d (pid %s) cannot be killed, not even by SIGKILL: left behind", action.rank, line.facts.pid)
            self.crew.abandon(line)

    def _interrupts(self) -> list[m.Event]:
        return [m.Interrupted(number) for number in self.signals.take()]

    def _hear(self, line: RankLine) -> list[m.Event]:
        return [event for message in line.read() for event in self._understand(line, message)]

    def _understand(self, line: RankLine, message: Message) -> list[m.Event]:
        rank = line.facts.worker.rank
        if message.kind is Kind.READY:
            line.facts.was_ready = True
            return [m.Ready(rank)]
        if message.kind is Kind.LINGERS:
            self.lingers[rank] = message.body.decode()
            return []
        line.facts.report = message
        if message.kind is Kind.RETURNED:
            return [m.Returned(rank)]
        return [m.Failed(rank, is_secondary(message.body))]

    def _mourn(self, line: RankLine) -> list[m.Event]:
        """A rank has ended. What it had sent comes first; what it could not send is in its black box."""
        if line.facts.died_at is not None:
            return []
        line.facts.died_at = time.monotonic()
        code = line.process.poll()
        line.facts.exit_code = code if line.process.exit_is_known() else None
        events = self._hear(line) if line.is_open else []
        line.facts.crash = line.crash_stack()
        if line.facts.report is None and (message := line.answer_left()) is not None:
            events += self._understand(line, message)
        return [*events, m.Died(line.facts.worker.rank)]

    def _warn(self) -> None:
        """About ranks that succeeded and yet did not end as they should."""
        for rank in self.machine.lingering:
            log.warning(
                "rank %d had returned but was still there %g s later (%s); stopped. Its value is kept",
                rank,
                self.spec.grace_period,
                self.lingers.get(rank) or "an exit hook or a finaliser that does not end",
            )
        for rank, facts in self.seen.items():
            if self.machine.verdict is m.Verdict.SUCCEEDED and rank not in self.machine.lingering and facts.exit_code:
                log.warning("rank %d had returned, and then %s. Its value is kept", rank, exit_text(facts.exit_code))

    def facts(self) -> Facts:
        """What was seen, for the diagnosis."""
        return Facts(
            ranks=self.seen,
            hostname=platform.node(),
            started_at=self.started_at,
            stopped_at=self.machine.stopped_at,
            verdict=self.machine.verdict,
            never_ready=self.machine.never_ready,
            timeout=self.spec.timeout,
            signum=self.machine.signum,
        )
