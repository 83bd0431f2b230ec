"""Suspends the ranks when the program is suspended (Ctrl-Z, SIGTSTP), and continues the ranks after SIGCONT.

    caller's thread                                       watcher thread
    ---------------                                       --------------
    handler of SIGTSTP: ProgramSuspension.request
    ProgramSuspension.suspend: pause the live view
                              --- Suspension ---------->  suspend_processes: SIGSTOP to the process group of each rank
                              <-- are_ranks_stopped ----  wait for `is_over`
    SIGTSTP to itself
          ... the whole program is stopped until it gets SIGCONT ...
    draw the live view again  --- is_over ------------->  SIGCONT to the process groups; shift all deadlines (Resumed)

The handler of SIGTSTP suspends the program at once in two cases: user code is running in the caller's thread, or the
caller's thread shows a debugger's prompt.

Guarantees:

- While the program is suspended, the watcher thread checks no deadlines, starts no ranks and stops no ranks.
- After a suspension, the watcher thread always continues. During a suspension, the watcher thread waits until the caller's
  thread releases the lock `Suspension.is_over`. The caller's thread releases this lock even if an exception interrupts the
  suspension.
- A process that was already stopped before the suspension stays stopped after the suspension.

In an orphaned Unix process group, the kernel ignores SIGTSTP, because no shell could continue the program. For example,
`ssh -t host python x.py` starts the program in an orphaned Unix process group. If the kernel ignores SIGTSTP, the ranks
continue at once.
"""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.processes import list_group_members, read_process_state
from mpwatch.os_support.signals import get_handler, set_handler
from mpwatch.watcher.observers.view_driver import ViewDriver
from mpwatch.watcher.processes.process import RankPopen

STOP_SECONDS = 2.0  # the limit for the watcher thread to stop the ranks; it may be starting ranks, or waiting for helpers
POLL_SECONDS = 0.05  # how often the caller's thread checks whether the watcher thread still runs


def _make_locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Suspension:
    """One suspension of the program.

    Its locks are no events, because `threading.Event.set` is written in Python, and a signal handler that raises there could
    leave the event unset. No signal handler can interrupt `Lock.release`.
    """

    requested_at: float = field(default_factory=monotonic)  # time limits do not count from then to the end
    are_ranks_stopped: threading.Lock = field(default_factory=_make_locked)  # released by the watcher thread
    is_over: threading.Lock = field(default_factory=_make_locked)  # released by the caller's thread


class ProgramSuspension:
    """Suspends the program and its ranks if SIGTSTP arrives while a blocking call is running.

    Each blocking call has its own ProgramSuspension. Only the main thread uses this class.

    Args:
        post: passes a Suspension to the watcher thread.
        is_watcher_running: returns whether the watcher thread can take a suspension.
    """

    def __init__(self, post: Callable[[Suspension], object], is_watcher_running: Callable[[], bool]) -> None:
        self.is_requested = False
        self.view: ViewDriver | None = None  # leaves the terminal to others while the program is suspended
        self._is_under_way = False
        self._post = post
        self._is_watcher_running = is_watcher_running

    def request(self, *, at_once: bool) -> None:
        """Record that the program must be suspended. If `at_once` is True, suspend the program now."""
        self.is_requested = True
        if at_once:
            self.suspend()

    def suspend(self) -> None:
        """Suspend the ranks and this program, if `request` was called. Return when the program has been continued.

        If `request` is called while `suspend` is running, the request has no effect. When a process gets SIGCONT, the kernel
        also drops a pending SIGTSTP.
        """
        if not self.is_requested or self._is_under_way:
            return
        suspension = Suspension()
        try:
            self._is_under_way = True
            if self.view is not None:
                self.view.pause()
            self._post(suspension)
            self._wait_until_ranks_are_stopped(suspension)
            _stop_this_program()
        finally:
            # This comes first. It is one call of C, so another exception can only come after it.
            suspension.is_over.release()
            self.is_requested = self._is_under_way = False
            if self.view is not None:
                self.view.resume()

    def suspend_after_call(self) -> None:
        """Send SIGTSTP to the calling program, if `request` was called after the last call of `suspend`.

        Call this method after the calling program's own signal handlers have been restored.
        """
        if self.is_requested:
            self.is_requested = False
            signal.raise_signal(signal.SIGTSTP)

    def _wait_until_ranks_are_stopped(self, suspension: Suspension) -> None:
        deadline = suspension.requested_at + STOP_SECONDS
        while not suspension.are_ranks_stopped.acquire(timeout=POLL_SECONDS):
            if not self._is_watcher_running() or monotonic() > deadline:
                return


def _stop_this_program() -> None:
    """Stop this program by the default action of SIGTSTP. Return after SIGCONT, or at once if the kernel ignores SIGTSTP."""
    handler = get_handler(signal.SIGTSTP)
    try:
        set_handler(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
    finally:
        set_handler(signal.SIGTSTP, handler)


def suspend_processes(suspension: Suspension, processes: Collection[RankPopen]) -> None:
    """Stop all processes of the ranks, and continue them when the suspension is over."""
    if not suspension.is_over.locked():  # the suspension is over already
        return
    with _stopped(processes):
        suspension.are_ranks_stopped.release()
        suspension.is_over.acquire()


@contextmanager
def _stopped(processes: Collection[RankPopen]) -> Iterator[None]:
    """Stop all processes in the Unix process groups of the ranks, and continue them at the end of the `with` block."""
    stopped_before = {pid for pids in _list_members(processes).values() for pid in pids if _is_stopped(pid)}
    try:
        for process in processes:
            process.send_signal_to_group(signal.SIGSTOP)
        yield
    finally:
        members = _list_members(processes) if stopped_before else {}
        for process in processes:
            pids = {process.pid, *members.get(process.pid, ())}
            if stopped_before.isdisjoint(pids):
                process.send_signal_to_group(signal.SIGCONT)
                continue
            for pid in pids - stopped_before:
                with suppress(Exception):  # the others must go on, too
                    os.kill(pid, signal.SIGCONT)


def _list_members(processes: Collection[RankPopen]) -> dict[int, list[int]]:
    """Return a dict from the pid of each rank to the pids in its process group. Return {} if the pids cannot be listed."""
    try:
        return list_group_members([process.pid for process in processes])
    except OSError:  # there is no descriptor left
        return {}


def _is_stopped(pid: int) -> bool:
    state = read_process_state(pid)
    return state is not None and state.letter == "T"
