"""Suspends the ranks when the program is suspended (Ctrl-Z, SIGTSTP), and continues the ranks after SIGCONT.

    caller's thread                                       watcher thread
    ---------------                                       --------------
    handler of SIGTSTP: is_requested
    ProgramSuspension.suspend --- Suspension ---------->  suspend_processes: SIGSTOP to the process group of each rank
                              <-- are_ranks_stopped ----  wait for `is_over`
    pause the live view; SIGTSTP to itself
          ... the whole program is stopped until it gets SIGCONT ...
    draw the live view again  --- is_over ------------->  SIGCONT to the process groups; shift all deadlines (Resumed)

In user code and at a debugger's prompt, the handler suspends the program at once. Meanwhile the watcher thread checks no
deadline, and starts and stops no rank; it goes on even if an exception interrupts the suspension. In an orphaned process
group, as under `ssh -t host python x.py`, no shell could continue the program, so the kernel ignores SIGTSTP, and the ranks
go on at once.
"""

import signal
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.signals import get_handler, set_handler
from mpwatch.watcher.processes.process import RankPopen

if TYPE_CHECKING:
    from mpwatch.live_view.live import LiveView

STOP_SECONDS = 2.0  # the limit for the watcher thread to stop the ranks; it may be starting ranks, or waiting for helpers


class Suspension:
    """One suspension. Its locks are no events: a handler that raises can interrupt `Event.set`, but not `Lock.release`."""

    def __init__(self) -> None:
        self.requested_at = monotonic()  # time limits do not count from then to the end
        self.are_ranks_stopped, self.is_over = threading.Lock(), threading.Lock()
        self.are_ranks_stopped.acquire()  # until the watcher thread releases it
        self.is_over.acquire()  # until the caller's thread releases it


class ProgramSuspension:
    """Suspends the program and its ranks on SIGTSTP. Each blocking call in the main thread has its own."""

    def __init__(self, post: Callable[[Suspension], object], is_watcher_running: Callable[[], bool]) -> None:
        self.is_requested = False
        self.view: LiveView | None = None  # leaves the terminal to others while the program is suspended
        self._is_under_way = False
        self._post = post
        self._is_watcher_running = is_watcher_running

    def suspend(self) -> None:
        """If it was requested, suspend the ranks and this program, until the program has been continued.

        A request meanwhile has no effect: SIGCONT also drops a pending SIGTSTP.
        """
        if not self.is_requested or self._is_under_way:
            return
        suspension = Suspension()
        try:
            self._is_under_way = True
            self._post(suspension)
            if self._is_watcher_running():
                suspension.are_ranks_stopped.acquire(timeout=STOP_SECONDS)
            if self.view is not None:  # later, since the terminal may be full of what the ranks print
                self.view.pause()
            _stop_this_program()
        finally:
            suspension.is_over.release()  # first: the watcher thread waits for it
            self.is_requested = self._is_under_way = False
            if self.view is not None:
                self.view.resume()


def _stop_this_program() -> None:
    """Return after SIGCONT, or at once if the kernel ignores SIGTSTP."""
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
    try:
        for process in processes:
            process.send_signal_to_group(signal.SIGSTOP)
        suspension.are_ranks_stopped.release()
        suspension.is_over.acquire()
    finally:
        for process in processes:
            process.send_signal_to_group(signal.SIGCONT)
