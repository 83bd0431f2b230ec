"""The watcher itself: starts the ranks, waits once for everything, and does what the machine says.

    spec -> payload -> ranks started -+-> wait(pidfds, channels, signals; next deadline) -+-> facts -> result
                                      |        what the system says  ->  events           |
                                      `--------- actions  <-  machine  <------------------'

Guarantees: when `watch` returns or raises, every rank it started is dead and reaped (but for one that not even SIGKILL
ends, which is logged), and everything it opened is closed. A message is read before the death that followed it. Nothing
blocks but the one wait, and that has the machine's deadline. No thread is started.
"""

import dataclasses
import logging
import os
import platform
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Self, TypeVar

from ..errors import LaunchError
from ..platform import anonymous_file
from ..result import RunResult
from ..spec import Worker, WorkerSpec
from ..wire.lastwords import SLOT, read_answer, read_crash
from ..wire.messages import Frames, Kind, Message, frame
from ..wire.payload import Payload
from ..wire.process import Seat
from . import machine as m
from .diagnosis import Facts, RankFacts, diagnose, is_secondary
from .environment import environment_of, reserve_port, workers_of
from .guardian import Guardian
from .process import WatchedProcess
from .sending import pack_call
from .signals import HostSignals

__all__ = ["InterruptError", "watch"]

T = TypeVar("T")
log = logging.getLogger("mpwatch")

READ_SIZE = 1 << 18
DRAIN_LIMIT = 1 << 26  # bytes read of one channel before the others have their turn


class InterruptError(Exception):
    """A signal to this process ended the run. All is cleaned up; the signal has yet to do what it would have done."""

    def __init__(self, signum: int, result: RunResult[Any]) -> None:
        super().__init__(signum, result)
        self.signum = signum
        self.result = result


def watch(spec: WorkerSpec[T]) -> RunResult[T]:
    """Run it to its end. Raises LaunchError, or InterruptError."""
    assert isinstance(spec.nprocs, int)
    payload = pack_call(spec)
    with ExitStack() as stack:
        stack.callback(payload.close)
        signals = stack.enter_context(HostSignals())
        keeper = stack.enter_context(reserve_port())
        workers = workers_of(spec, spec.nprocs, keeper.getsockname()[1])
        environments = [environment_of(worker, spec.environment_of(worker)) for worker in workers]
        crew = stack.enter_context(Crew(payload))
        for worker, env in zip(workers, environments, strict=True):
            crew.start(worker, env)
        run = _Run(spec, crew, signals)
        run.until_over()
    result = diagnose(run.facts())
    if run.machine.signum is not None:
        raise InterruptError(run.machine.signum, result)
    return result


class RankLine:
    """One rank as the watcher has it: its process, its channel, and what was seen of it."""

    def __init__(self, worker: Worker, process: WatchedProcess, channel: socket.socket, lastwords_fd: int) -> None:
        self.process = process
        self.channel = channel
        self.lastwords_fd = lastwords_fd
        self.frames = Frames()
        self.facts = RankFacts(worker)

    def send(self, kind: Kind, fds: list[int]) -> None:
        """One small message: it fits into the empty buffer of the channel, so this does not block."""
        # a rank that has closed its end, or died, is heard of otherwise
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.channel, [frame(kind)], fds)

    def close(self) -> None:
        """Give the descriptors back; the process is the crew's to bury."""
        self.channel.close()
        os.close(self.lastwords_fd)

    def read(self) -> list[Message]:
        """What has come. Closes the channel if there will be no more."""
        messages: list[Message] = []
        try:
            for _ in range(DRAIN_LIMIT // READ_SIZE):
                data = self.channel.recv(READ_SIZE)
                if not data:
                    self.channel.close()
                    break
                messages += self.frames.feed(data)
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:  # reset by a dead rank, or written to by somebody who is none
            log.debug("channel of rank %d closed: %s", self.facts.worker.rank, error)
            self.channel.close()
        return messages


class Crew:
    """Owns the ranks' processes and all that they need. A context manager: whoever is alive at its end is killed."""

    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self.lines: dict[int, RankLine] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            try:
                self.guardian = stack.enter_context(closing(Guardian()))
            except OSError as error:
                raise LaunchError(f"the ranks cannot be watched: {error}; this machine is short of something") from error
            stack.callback(self._kill_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, worker: Worker, env: dict[str, str]) -> None:
        """Start a rank. Raises LaunchError."""
        try:
            self._start(worker, env)
        except (OSError, RuntimeError, AssertionError) as error:
            raise LaunchError(_why_not_started(worker, error)) from error

    def _start(self, worker: Worker, env: dict[str, str]) -> None:
        with ExitStack() as stack:
            lastwords_fd = anonymous_file("mpwatch-lastwords")
            stack.callback(os.close, lastwords_fd)
            os.ftruncate(lastwords_fd, SLOT)
            ours, theirs = map(stack.enter_context, socket.socketpair())
            ours.setblocking(False)
            seat = Seat(_fields_of(worker), theirs.fileno(), lastwords_fd)
            process = WatchedProcess(seat, env, [theirs.fileno(), lastwords_fd], f"mpwatch-rank-{worker.rank}")
            process.start()
            theirs.close()
            stack.pop_all()
        line = self.lines[worker.rank] = RankLine(worker, process, ours, lastwords_fd)
        line.facts.pid = process.pid
        assert process.pid is not None
        self.guardian.guard(process.pid)

    def bury(self, line: RankLine) -> None:
        """Reap a dead rank."""
        pid = line.process.pid
        assert pid is not None
        line.process.bury()
        line.close()
        self.guardian.release(pid)
        del self.lines[line.facts.worker.rank]

    def abandon(self, line: RankLine) -> None:
        """Leave a rank that cannot be killed to the kernel. multiprocessing reaps it when it looks after its children."""
        line.close()
        del self.lines[line.facts.worker.rank]

    def _kill_all(self) -> None:
        """For the ranks that are left when something has gone wrong on our side."""
        for line in self.lines.values():
            line.process.signal_group(9)
        deadline = time.monotonic() + m.KILL_SECONDS
        for line in list(self.lines.values()):
            if wait([line.process.sentinel], max(0.0, deadline - time.monotonic())):
                self.bury(line)
            else:
                self.abandon(line)


def _answer_left_by(line: RankLine) -> Message | None:
    try:
        return read_answer(line.lastwords_fd)
    except ValueError as error:
        log.debug("the black box of rank %d: %s", line.facts.worker.rank, error)
        return None


def _fields_of(worker: Worker) -> dict[str, Any]:
    """What a rank needs to know itself, without `state`, which is its own."""
    return {field.name: getattr(worker, field.name) for field in dataclasses.fields(worker) if field.name != "state"}


def _why_not_started(worker: Worker, error: Exception) -> str:
    text = f"rank {worker.rank} could not be started: {type(error).__name__}: {error}"
    if isinstance(error, RuntimeError):
        text = (
            "mpwatch was called while __main__ is being imported again, by a process that multiprocessing has spawned (a "
            "DataLoader's worker, say); put the call under: if __name__ == '__main__':"
        )
    elif isinstance(error, AssertionError):
        text += "; start the run in a process that is not daemonic"
    elif isinstance(error, OSError):
        text += "; see `ulimit -n` (descriptors: about 4 a rank), `ulimit -u` (processes) and the free memory"
    return text


class _Run:
    """One pass through the machine."""

    def __init__(self, spec: WorkerSpec[Any], crew: Crew, signals: HostSignals) -> None:
        self.spec = spec
        self.crew = crew
        self.signals = signals
        self.lingers: dict[int, str] = {}
        self.started_at = time.monotonic()
        self.seen = {rank: line.facts for rank, line in crew.lines.items()}
        self.machine = m.Machine(crew.lines, now=self.started_at, grace_period=spec.grace_period, timeout=spec.timeout)

    def until_over(self) -> None:
        """Wait and act until no rank is left."""
        while self.machine.stage is not m.Stage.OVER:
            sources = self._sources()
            deadline = self.machine.deadline
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = set(wait(list(sources), patience))
            events = [event for fd, handle in sources.items() if fd in ready for event in handle()]
            self._step(events)
        self._warn()

    def _sources(self) -> dict[int, Callable[[], list[m.Event]]]:
        sources: dict[int, Callable[[], list[m.Event]]] = {self.signals.fileno(): self._interrupts}
        for line in self.crew.lines.values():
            if line.channel.fileno() != -1:
                sources[line.channel.fileno()] = partial(self._hear, line)
            sources[line.process.sentinel] = partial(self._mourn, line)
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
            line.send(Kind.CALL, self.crew.payload.fds)
        elif isinstance(action, m.EndRank):
            if line.channel.fileno() != -1:
                line.send(Kind.END, [])
        elif isinstance(action, m.SignalRank):
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
        """A rank has ended. What it had sent comes first; what it could not send is in its slot."""
        if line.facts.died_at is not None:
            return []
        line.facts.died_at = time.monotonic()
        line.facts.exit_code = line.process.exitcode if line.process.exit_is_known() else None
        events = self._hear(line) if line.channel.fileno() != -1 else []
        line.facts.crash = read_crash(line.lastwords_fd)
        if line.facts.report is None and (message := _answer_left_by(line)) is not None:
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
