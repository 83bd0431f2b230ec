"""Between the caller's threads and the thread that watches the ranks: what is asked, and what has come of it.

    caller's thread --- post: a call, a signal, the end ---> bell: the watching thread wakes up and takes it
                    <--- alarm: the caller wakes up and looks --- what has changed, what it has to judge, how the ranks fare

A bell is a pair of sockets. It can be waited for together with other descriptors, may be rung by anybody at any time, a
signal handler too, and keeps the ring until it is heard.
"""

import socket
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress

from mpwatch.errors import LaunchError
from mpwatch.options.worker_info import Worker
from mpwatch.results.model import WorkerState
from mpwatch.results.rank_status import RankStatus
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.machine.transitions import Event, Restart
from mpwatch.wire.pickling.call_payload import Payload
from mpwatch.wire.resource_errors import with_remedy


class WakeupPipe:
    """Readable once it has been rung. Raises LaunchError if it cannot be had."""

    def __init__(self) -> None:
        try:
            self._pair = socket.socketpair()  # objects that close themselves, unlike the ends of os.pipe()
        except OSError as error:
            raise LaunchError(with_remedy("signals cannot be waited for", error)) from error
        for end in self._pair:
            end.setblocking(False)

    def fileno(self) -> int:
        """What to wait on."""
        return self._pair[0].fileno()

    @property
    def write_fd(self) -> int:
        """The descriptor to write to: a byte rings."""
        return self._pair[1].fileno()

    def wake(self) -> None:
        """From any thread."""
        with suppress(OSError):  # full: who looks is told all; closed: nobody listens any more
            self._pair[1].send(b"\0")

    def drain(self) -> bytes:
        """What was written to ring it since the last time; nothing if it has not been."""
        with suppress(OSError):
            return self._pair[0].recv(4096)
        return b""

    def close(self) -> None:
        """Give the descriptors back."""
        for end in self._pair:
            end.close()


class PendingCall:
    """One call of all ranks, and what came of it."""

    def __init__(self, payload: Payload, started_at: float, timeout: float | None) -> None:
        self.payload = payload
        self.started_at = started_at
        self.timeout = timeout  # seconds from then on
        self.observations: list[AttemptObservations] = []  # of all ranks; or of each, if they are started again one by one
        self.is_done = False  # and the ranks stay; else the facts are there when all of them have ended


class RestartCommand:
    """Ranks that are to be started again: when, and how each."""

    def __init__(self, event: Restart, setups: list[tuple[Worker, dict[str, str]]]) -> None:
        self.event = event
        self.setups = setups


class StatusRequest:
    """The caller wants to know how the ranks fare now."""

    def __init__(self) -> None:
        self.statuses: Sequence[RankStatus] | None = None  # until it is answered, which a run that ends does not do


class TerminalRestore:
    """What puts a terminal in order, and its name; None if nothing is to be done. For the guardian, should we be killed."""

    def __init__(self, what: tuple[str, bytes] | None) -> None:
        self.what = what


class CommandQueue:
    """What both sides see. Each field is written by one of them."""

    def __init__(self) -> None:
        with ExitStack() as stack:
            self.watcher_wakeup = stack.enter_context(closing(WakeupPipe()))
            self.caller_wakeup = stack.enter_context(closing(WakeupPipe()))
            self._wakeups = stack.pop_all()
        self.state = WorkerState.UNKNOWN  # of the ranks, for whoever asks
        self._posted: deque[Event | PendingCall | StatusRequest | TerminalRestore | RestartCommand] = deque()
        self._failed: deque[AttemptObservations] = deque()

    def post(self, thing: Event | PendingCall | StatusRequest | TerminalRestore | RestartCommand) -> None:
        """From the caller's threads, and from signal handlers."""
        self._posted.append(thing)
        self.watcher_wakeup.wake()

    def take(self) -> list[Event | PendingCall | StatusRequest | TerminalRestore | RestartCommand]:
        """What has been posted since the last time."""
        self.watcher_wakeup.drain()
        return [self._posted.popleft() for _ in range(len(self._posted))]

    def ask(self, observations: AttemptObservations) -> None:
        """From the watching thread: are these ranks, which have failed, worth another try?"""
        self._failed.append(observations)
        self.caller_wakeup.wake()

    def take_decision_requests(self) -> list[AttemptObservations]:
        """What has been asked since the last time."""
        return [self._failed.popleft() for _ in range(len(self._failed))]

    def close(self) -> None:
        """Give the descriptors back."""
        self._wakeups.close()
