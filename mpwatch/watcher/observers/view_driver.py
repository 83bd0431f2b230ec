"""The live view of a run, if there is one, as the caller's thread serves it while it waits: now and then the ranks' thread
is asked how they fare, and what it answers is shown.

    caller's thread    a look is due --> post a Look --> sleep until it is answered --> show --> sleep until the next is due
    thread of the life                       `--> statuses_of --> alarm --^

A view in a terminal keeps some of its rows. What gives them back is entrusted to the guardian, should we be killed.

A view calls code that is not ours (rich, IPython) and writes to what may be slow or gone. One that raises is logged and
dropped; it never fails a run. Where there is no view, nobody asks and nobody wakes up.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from mpwatch.results.rank_status import RankStatus
from mpwatch.watcher.commands import CommandQueue, PendingCall, StatusRequest, TerminalRestore
from mpwatch.watcher.observers.status_snapshot import last_statuses

log = logging.getLogger("mpwatch")
MOST_CLOSINGS = 2


class View(Protocol):
    """What shows the ranks, from when a call is waited for until it is over. Each method may raise anything."""

    @property
    def period(self) -> float:
        """Seconds until it wants to see them again; infinite if it does not."""

    @property
    def repair(self) -> tuple[str, bytes] | None:
        """The name of a terminal, and what puts it in order again; None if there is nothing to be put in order."""

    def show(self, statuses: Sequence[RankStatus]) -> None:
        """This is how they fare, in order of their ranks."""

    def close(self, statuses: Sequence[RankStatus]) -> None:
        """This is how they fared in the end; empty if nobody knows. Nothing more is shown. It may be called again."""


MakeView = Callable[[], View | None]


def no_view() -> None:
    """For who shows nothing."""


class ViewDriver:
    """Of one call. For the caller's thread alone; nothing that it does raises an Exception."""

    def __init__(self, make_view: MakeView, commands: CommandQueue, pending_call: PendingCall) -> None:
        self._commands = commands
        self._pending_call = pending_call
        self._look: StatusRequest | None = None  # that has yet to be answered
        self._view: View | None = None
        self._due_at = 0.0  # when the next one is
        self._closings = 0
        self._entrusted: tuple[str, bytes] | None = None
        self._guard(lambda: self._begin(make_view))

    def patience(self) -> float | None:
        """How long one may sleep; None: until somebody rings the alarm, as who answers does."""
        if self._view is None or self._look is not None or self._due_at == math.inf:
            return None
        return max(0.0, self._due_at - time.monotonic())

    def attend(self) -> None:
        """Show what has been answered, and ask if it is time to."""
        if self._view is None:
            return
        if self._look is None:
            if time.monotonic() >= self._due_at:
                self._look = StatusRequest()
                self._commands.post(self._look)
        elif self._look.statuses is not None:
            statuses, self._look = self._look.statuses, None
            self._guard(lambda: self._show(statuses))

    def close(self) -> None:
        """The call is over, or is given up. Called again, should an exception have come in the midst of it: that is tried
        once more, for a terminal has to be put in order, and then no more, for it may be the view itself that throws.
        """
        view = self._view
        self._closings += 1
        if view is not None and self._closings <= MOST_CLOSINGS:
            self._guard(lambda: self._finish(view))
        self._view = None

    def _begin(self, make_view: MakeView) -> None:
        self._view = make_view()
        self._wait()

    def _show(self, statuses: Sequence[RankStatus]) -> None:
        if self._view is not None:
            self._view.show(statuses)
            self._entrust(self._view)
            self._wait()

    def _finish(self, view: View) -> None:
        view.close(last_statuses(self._pending_call.observations))
        self._entrust(view)

    def _entrust(self, view: View) -> None:
        """The guardian knows what it would have to put in order."""
        repair = view.repair
        if repair != self._entrusted:
            self._entrusted = repair
            self._commands.post(TerminalRestore(repair))

    def _wait(self) -> None:
        if self._view is not None:
            self._due_at = time.monotonic() + self._view.period

    def _guard(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            view, self._view = self._view, None
            with suppress(Exception):  # it leaves what it holds
                if view is not None:
                    view.close(())
                    self._entrust(view)
            with suppress(Exception):  # it may have been the log
                log.warning("the live view has failed; the run goes on without it", exc_info=error)
