"""The queues between the caller's threads and the watcher thread. Some commands have an answer.

    caller's thread --- post: a command, watcher_wakeup.wake() ---------------> watcher thread: take
    caller's thread <-- an answer in a field, wake_callers() ------------------ watcher thread

    command           answer
    PendingCall       its `observations` and `is_done`.
    CallEvent         none
    StatusRequest     its `statuses`; any thread may wait for its `is_answered`
    StacksRequest     its `stacks`; any thread may wait for its `is_answered`
    StartLostRanks    none
    StopAfter         none
    Suspend           `are_ranks_stopped`. Then the watcher thread waits for its `is_over`
    RestartCommand    none; this command is itself the answer to `request_decision` of the watcher thread
    DelayedAction     none
    machine events    none: Interrupted, StopRequested, Shutdown, DoNotRestart, CancelAttempt, Lease, SuspendLimits,
                      ResumeLimits

Each thread waits until its own WakeupPipe becomes readable, and then reads its queues. To answer a command, the watcher
thread sets a field of the command, and a caller's thread reads this field. The watcher thread and the caller's threads never
write the same field of a command.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ref

from mpwatch.os_support.clock import monotonic
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
    """An event that concerns only the ranks of one call of a WorkerGroup."""

    call: PendingCall
    event: Event


@dataclass(eq=False)
class RestartCommand:
    """A command to restart the ranks of a restart group."""

    event: Restart
    setups: list[RankSetup]


@dataclass(eq=False)
class StartLostRanks:
    """A command to restart the lost ranks of a WorkerGroup with scope="worker"."""

    setups: list[RankSetup]


@dataclass(frozen=True, eq=False)
class StopAfter:
    """A command that makes the ranks stop at their first step after `step`. All nodes of a job use the same `step`."""

    step: int | None
    """None if no rank has passed a step. If `step` is None, the ranks stop at their next call of `should_stop`."""
    cause: str


@dataclass(eq=False)
class StatusRequest:
    """A request for the current status of every rank."""

    statuses: Sequence[RankStatus] | None = None
    """None until the watcher thread answers. If the run ends first, no answer comes."""
    is_answered: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class StacksRequest:
    """A request for the current stacks of every rank. The ranks continue to run after they have sent their stacks."""

    stacks: Stacks | None = None
    """None until the watcher thread answers. If the run ends first, no answer comes."""
    is_answered: threading.Event = field(default_factory=threading.Event)


def _make_locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Suspend:
    """A command to suspend all ranks while the program is suspended, for example after Ctrl-Z. See suspension.py.

    `threading.Event.set` is written in Python. If a signal handler raises an exception inside `Event.set`, the event can
    stay unset. `Suspend` uses locks instead of events, because no signal handler can interrupt `Lock.release`.
    """

    requested_at: float = field(default_factory=monotonic)
    """In seconds of CLOCK_MONOTONIC. Time limits do not count the time from this request to the end of the suspension."""
    are_ranks_stopped: threading.Lock = field(default_factory=_make_locked)
    """A lock that the watcher thread releases when the ranks are stopped."""
    is_over: threading.Lock = field(default_factory=_make_locked)
    """A lock that the caller's thread releases when the suspension is over."""


@dataclass(eq=False)
class DelayedAction:
    """A command to call `action` in the watcher thread after the time `due_at`.

    `action` must run no user code, and must not block.
    """

    due_at: float
    """In seconds of CLOCK_MONOTONIC."""
    action: Callable[[], object]


Command = (
    Event
    | CallEvent
    | PendingCall
    | StatusRequest
    | StacksRequest
    | RestartCommand
    | StartLostRanks
    | StopAfter
    | Suspend
    | DelayedAction
)


class DebuggerSocket(NamedTuple):
    """A socket between a rank and the debugger's console. See worker/debugger.py."""

    rank: int
    fd: int
    purpose: str


class CommandQueue:
    """The queues between the caller's threads and the watcher thread, and the wake-up pipes of all these threads.

    The watcher thread calls `request_decision` and `offer_debugger_socket`. The caller's threads call
    `take_decision_requests` and `take_debugger_sockets`.
    """

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
        """Return a wake-up pipe that becomes readable when `wake_callers` is called.

        No other thread gets this pipe until `release_caller_wakeup` is called or the object `user` is deleted.

        Raises LaunchError if a new pipe is needed but this process has reached its limit of open files.
        """
        with self._wakeups_lock:
            pipe = next((pipe for pipe, get_user in self._caller_wakeups if get_user() is None), None)
            if pipe is None:
                pipe = self._wakeups.enter_context(closing(WakeupPipe()))
            self._set_user(pipe, ref(user))
            return pipe

    def release_caller_wakeup(self, pipe: WakeupPipe) -> None:
        """Make the pipe available to other threads of the caller."""
        with self._wakeups_lock:
            self._set_user(pipe, _no_user)

    def _set_user(self, pipe: WakeupPipe, get_user: Callable[[], object]) -> None:
        others = (wakeup for wakeup in self._caller_wakeups if wakeup[0] is not pipe)
        self._caller_wakeups = ((pipe, get_user), *others)

    def wake_callers(self) -> None:
        """Wake up all threads of the caller that wait for the watcher thread. Any thread may call this method."""
        for pipe, get_user in self._caller_wakeups:
            if get_user() is not None:
                pipe.wake()

    def post(self, command: Command) -> None:
        """Send a command to the watcher thread. Any thread and any signal handler may call this method."""
        self._commands.append(command)
        self.watcher_wakeup.wake()

    def take(self) -> list[Command]:
        """Return the commands that were posted since the last call of `take`. Only the watcher thread calls this method."""
        self.watcher_wakeup.drain()
        return [self._commands.popleft() for _ in range(len(self._commands))]

    def request_decision(self, observations: AttemptObservations) -> None:
        """Ask the caller's thread whether to restart the ranks of a failed attempt."""
        self._decision_requests.append(observations)
        self.wake_callers()

    def take_decision_requests(self) -> list[AttemptObservations]:
        """Return the failed attempts that were passed to `request_decision` since the last call of this method."""
        return [self._decision_requests.popleft() for _ in range(len(self._decision_requests))]

    def offer_debugger_socket(self, debugger_socket: DebuggerSocket) -> None:
        """Pass the socket of a rank's debugger to the caller's thread."""
        self._debugger_sockets.append(debugger_socket)
        self.wake_callers()

    def has_debugger_sockets(self) -> bool:
        """Return whether `take_debugger_sockets` would return any socket."""
        return bool(self._debugger_sockets)

    def take_debugger_sockets(self) -> list[DebuggerSocket]:
        """Return the debugger sockets that were offered since the last call of this method."""
        return [self._debugger_sockets.popleft() for _ in range(len(self._debugger_sockets))]

    def close(self) -> None:
        for debugger_socket in self.take_debugger_sockets():
            os.close(debugger_socket.fd)
        self._wakeups.close()


def _no_user() -> None:
    """Return None. `CommandQueue` stores this function for each wake-up pipe that no thread uses."""
