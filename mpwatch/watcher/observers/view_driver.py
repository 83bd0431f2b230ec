"""Updates the live view, in the caller's thread, while this waits for the end of a call.

    caller's thread --- an update is due: ask for the statuses ---> watcher thread: current_statuses
                    <--- wake-up: show the statuses, sleep until the next update is due ---'

A view runs code of other packages (rich, IPython), and writes to a terminal that may be closed. If it raises, it is logged
and removed, and the run goes on.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from mpwatch.os_support.clock import monotonic
from mpwatch.results.model import RankStatus
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.observers.deferred_log import log_now
from mpwatch.watcher.observers.status_snapshot import final_statuses
from mpwatch.wire.exceptions.decoder import USER_ERRORS


class View(Protocol):
    @property
    def period(self) -> float:
        """The seconds from one update to the next. Infinite if no more are needed."""

    def show(self, statuses: Sequence[RankStatus]) -> None:
        """Show the present statuses, sorted by rank."""

    def pause(self) -> None:
        """Let other output use the terminal until the next call of `show`."""

    def close(self, statuses: Sequence[RankStatus]) -> None:
        """Show the final statuses, sorted by rank, or none if none are known. It is called again if it was interrupted."""


MakeView = Callable[[], View | None]


def no_view() -> None:
    """The MakeView of a call without a live view."""


class ViewDriver:
    """The view of one run or call. Its methods raise only what ends the run, such as KeyboardInterrupt."""

    def __init__(self, make_view: MakeView, ask: Callable[[Callable[[Sequence[RankStatus]], object]], object]) -> None:
        self._ask = ask
        self._is_asking = False
        self._statuses: Sequence[RankStatus] | None = None  # that have come
        self._view: View | None = None
        self._due_at = 0.0  # when the next update is due
        self._guard(lambda: self._open(make_view))

    def _open(self, make_view: MakeView) -> None:
        self._view = make_view()
        if self._view is not None:
            self._due_at = monotonic() + self._view.period

    @property
    def next_update_at(self) -> float:
        """By CLOCK_MONOTONIC. Infinity: this thread may sleep until another thread wakes it up."""
        return math.inf if self._view is None or self._is_asking else self._due_at

    def update(self) -> None:
        if self._view is None:
            return
        if not self._is_asking and monotonic() >= self._due_at:
            self._is_asking = True
            self._ask(self._receive)
        if self._statuses is not None:
            statuses, self._statuses, self._is_asking = self._statuses, None, False
            self._use(lambda view: self._show(view, statuses))

    def _receive(self, statuses: Sequence[RankStatus]) -> None:  # in the watcher thread
        self._statuses = statuses

    def pause(self) -> None:
        """Leave the terminal to a debugger's prompt or a shell, until the next update."""
        self._use(lambda view: view.pause())

    def resume(self) -> None:
        if self._due_at < math.inf:
            self._due_at = 0.0

    def close(self, attempts: Iterable[AttemptObservations]) -> None:
        """Show what the attempts have ended with. If Ctrl-C interrupts this, call it again, to restore the terminal."""
        self.close_with(lambda: final_statuses(attempts))

    def close_with(self, list_statuses: Callable[[], Sequence[RankStatus]]) -> None:
        self._use(lambda view: view.close(list_statuses()))
        self._view = None

    def _show(self, view: View, statuses: Sequence[RankStatus]) -> None:
        view.show(statuses)
        self._due_at = monotonic() + view.period

    def _use(self, use: Callable[[View], None]) -> None:
        if (view := self._view) is not None:
            self._guard(lambda: use(view))

    def _guard(self, do: Callable[[], None]) -> None:
        """If it raises, remove the view, unless the exception ends the run."""
        try:
            do()
        except USER_ERRORS as error:
            view, self._view = self._view, None
            with suppress(*USER_ERRORS):  # so that the view releases its rows of the terminal, if it still can
                if view is not None:
                    view.close(())
            log_now(logging.WARNING, "the live view failed; the run goes on without it", error=error)
        except BaseException:
            self._due_at = math.inf  # a view that raises at each update would interrupt the end of the run again and again
            raise
