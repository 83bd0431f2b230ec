"""What crosses between the caller's threads and the watcher thread: commands in one direction, answers in the other.

    caller's thread --- post: a command, watcher_wakeup.wake() ---------------> watcher thread: take
    caller's thread <-- an answer in a field, wake_callers() ------------------ watcher thread

    command           answer
    PendingCall       its `observations` and `is_done`. See direct_calls.py for calls that need no command
    CallEvent         none
    StatusRequest     its `statuses`; any thread may wait for its `is_answered`
    StacksRequest     its `stacks`; the same
    StartLostRanks    none
    StopAfter         none
    ForwardSignal     none
    Suspend           `are_ranks_stopped`. Then the watcher thread waits for its `is_over`
    RestartCommand    none; it is itself the answer to what the watcher thread has passed to `request_decision`
    TerminalRestore   none
    TerminalModes     none
    DelayedAction     none
    machine events    none: Interrupted, StopRequested, Shutdown, DoNotRestart, CancelAttempt, Lease, SuspendLimits,
                      ResumeLimits

Each side waits for its WakeupPipe, and then looks at the queues and the fields. Each field is written by one side only.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

from mpwatch.results.model import WorkerState
from mpwatch.results.rank_status import RankStatus
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.machine.transitions import Event, Restart
from mpwatch.watcher.pending_call import PendingCall
from mpwatch.watcher.processes.rank_environment import RankSetup
from mpwatch.watcher.wakeup_pipe import WakeupPipe


@dataclass(frozen=True, eq=False)
class CallEvent:
    """An event for the ranks of one call of a WorkerGroup alone."""

    call: PendingCall
    event: Event


@dataclass(eq=False)
class RestartCommand:
    """Start the ranks of a restart group again."""

    event: Restart
    setups: list[RankSetup]


@dataclass(eq=False)
class StartLostRanks:
    """Start ranks of a WorkerGroup with scope="worker" again that were lost."""

    setups: list[RankSetup]


@dataclass(frozen=True, eq=False)
class StopAfter:
    """Let the ranks stop at their first step above this one. The nodes of a job have agreed on it."""

    step: int | None
    """None: no rank has passed a step, so they stop at their next question."""
    cause: str


@dataclass(eq=False)
class StatusRequest:
    """Take the status of every rank now."""

    statuses: Sequence[RankStatus] | None = None
    """None until the request is answered. It is never answered if the run ends before."""
    is_answered: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class StacksRequest:
    """Take the stacks of every rank now. The ranks go on."""

    stacks: Stacks | None = None
    """None until the request is answered. It is never answered if the run ends before."""
    is_answered: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class TerminalRestore:
    """Have the guardian put a terminal in order if the watcher is killed."""

    restore: tuple[str, bytes] | None
    """The name of the terminal, and the bytes to write to it. None if nothing is to be restored."""


@dataclass(eq=False)
class TerminalModes:
    """Have the guardian give a terminal these modes if the watcher is killed."""

    path: str
    modes: list[Any] | None
    """As `termios.tcgetattr` returns them. None if nothing is to be restored."""


@dataclass(frozen=True, eq=False)
class ForwardSignal:
    """Pass a signal on to the ranks that are running their function: see signal_forwarding.py."""

    signum: int
    call: PendingCall | None
    """The call of a WorkerGroup whose ranks are meant. None: all ranks."""


def _make_locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Suspend:
    """Stop all ranks, and wait until the program has been continued. Then continue them: see suspension.py.

    A signal handler makes and posts it. So it has bare locks, whose methods are single calls of C.
    """

    requested_at: float = field(default_factory=time.monotonic)
    """In seconds of CLOCK_MONOTONIC. No limit counts the time from then to the end of the suspension."""
    are_ranks_stopped: threading.Lock = field(default_factory=_make_locked)
    """The watcher thread releases it."""
    is_over: threading.Lock = field(default_factory=_make_locked)
    """The caller's thread releases it."""


@dataclass(eq=False)
class DelayedAction:
    """Call `action` in the watcher thread, no sooner than `due_at`. It runs no user code and does not block."""

    due_at: float
    """In seconds of CLOCK_MONOTONIC."""
    action: Callable[[], object]


Command = (
    Event
    | CallEvent
    | PendingCall
    | StatusRequest
    | StacksRequest
    | TerminalRestore
    | TerminalModes
    | RestartCommand
    | StartLostRanks
    | StopAfter
    | ForwardSignal
    | Suspend
    | DelayedAction
)


class DebuggerSocket(NamedTuple):
    """A socket on which a rank talks to the debugger's console: see worker/debugger.py."""

    rank: int
    fd: int
    purpose: str


class CommandQueue:
    """The queues between the caller's threads and the watcher thread, and the wake-up pipe of each side."""

    def __init__(self) -> None:
        with ExitStack() as stack:
            self.watcher_wakeup = stack.enter_context(closing(WakeupPipe()))
            # One pipe for each thread of the caller that waits. The function returns its user, or None.
            first_pipe = stack.enter_context(closing(WakeupPipe()))
            self._caller_wakeups: tuple[tuple[WakeupPipe, Callable[[], object]], ...] = ((first_pipe, _no_user),)
            self._wakeups = stack.pop_all()
        self._wakeups_lock = threading.Lock()
        self.state = WorkerState.UNKNOWN  # of all ranks together; written by the watcher thread
        self._commands: deque[Command] = deque()
        self._decision_requests: deque[AttemptObservations] = deque()
        self._debugger_sockets: deque[DebuggerSocket] = deque()

    def acquire_caller_wakeup(self, user: object) -> WakeupPipe:
        """Return a pipe that `wake_callers` wakes up.

        It belongs to the user until `release_caller_wakeup`, or until the user is deleted.

        Raises LaunchError if a pipe is needed and there is no descriptor left.
        """
        with self._wakeups_lock:
            pipe = next((pipe for pipe, get_user in self._caller_wakeups if get_user() is None), None)
            if pipe is None:
                pipe = self._wakeups.enter_context(closing(WakeupPipe()))
            self._set_user(pipe, ref(user))
            return pipe

    def release_caller_wakeup(self, pipe: WakeupPipe) -> None:
        """Leave the pipe to other threads of the caller."""
        with self._wakeups_lock:
            self._set_user(pipe, _no_user)

    def _set_user(self, pipe: WakeupPipe, get_user: Callable[[], object]) -> None:
        others = (wakeup for wakeup in self._caller_wakeups if wakeup[0] is not pipe)
        self._caller_wakeups = ((pipe, get_user), *others)

    def wake_callers(self) -> None:
        """Wake up all threads of the caller that wait for the watcher thread. Any thread may call it."""
        for pipe, get_user in self._caller_wakeups:
            if get_user() is not None:
                pipe.wake()

    def post(self, command: Command) -> None:
        """Send a command to the watcher thread. The caller's threads and signal handlers call this."""
        self._commands.append(command)
        self.watcher_wakeup.wake()

    def take(self) -> list[Command]:
        """Return the commands that were posted since the last call. The watcher thread calls this."""
        self.watcher_wakeup.drain()
        return [self._commands.popleft() for _ in range(len(self._commands))]

    def request_decision(self, observations: AttemptObservations) -> None:
        """Ask the caller's thread whether the ranks of a failed attempt are restarted. The watcher thread calls this."""
        self._decision_requests.append(observations)
        self.wake_callers()

    def take_decision_requests(self) -> list[AttemptObservations]:
        """Return the attempts to decide about that have come since the last call. The caller's thread calls this."""
        return [self._decision_requests.popleft() for _ in range(len(self._decision_requests))]

    def offer_debugger_socket(self, debugger_socket: DebuggerSocket) -> None:
        """Pass on the socket of a rank that is at a breakpoint. The watcher thread calls this."""
        self._debugger_sockets.append(debugger_socket)
        self.wake_callers()

    def has_debugger_sockets(self) -> bool:
        """Return whether `take_debugger_sockets` returns any."""
        return bool(self._debugger_sockets)

    def take_debugger_sockets(self) -> list[DebuggerSocket]:
        """Return the sockets that have come since the last call. The caller's thread calls this."""
        return [self._debugger_sockets.popleft() for _ in range(len(self._debugger_sockets))]

    def close(self) -> None:
        for debugger_socket in self.take_debugger_sockets():
            os.close(debugger_socket.fd)
        self._wakeups.close()


def _no_user() -> None:
    """Return the user of a pipe that has none."""
