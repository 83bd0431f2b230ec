"""The driver of the live view. The driver runs in the caller's thread while this thread waits for the end of a call.

    caller's thread --- an update is due: post a StatusRequest ---> watcher thread: current_statuses
                    <--- wake-up: show the statuses, sleep until the next update is due ---'

A view runs code of other packages (rich, IPython), and writes to a terminal that may be closed. If a view raises an
exception, the driver logs the exception and removes the view, so that the run does not fail.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from mpwatch.os_support.clock import monotonic
from mpwatch.results.rank_status import RankStatus
from mpwatch.watcher.commands import CommandQueue, StatusRequest
from mpwatch.watcher.observers.deferred_log import log_now
from mpwatch.watcher.observers.status_snapshot import final_statuses
from mpwatch.watcher.observers.user_errors import ignore_user_errors
from mpwatch.watcher.pending_call import PendingCall
from mpwatch.wire.exceptions.decoder import ENDS_RUN

MAX_CLOSES = 2


class View(Protocol):
    """A display of the ranks during one call. Each method of a view may raise any exception."""

    @property
    def period(self) -> float:
        """The seconds from one update of the view to the next. If the view needs no more updates, the period is infinite."""

    def show(self, statuses: Sequence[RankStatus]) -> None:
        """Show the present statuses, which are sorted by rank."""

    def pause(self) -> None:
        """Let other output use the terminal until the next call of `show`."""

    def close(self, statuses: Sequence[RankStatus]) -> None:
        """Show the final statuses, sorted by rank. `statuses` is empty if no status is known.

        The ViewDriver can call this method more than once.
        """


MakeView = Callable[[], View | None]


def no_view() -> None:
    """Return None. A call that has no live view uses this function as its MakeView."""


class ViewDriver:
    """Updates the view of one call, in the caller's thread.

    The methods of a ViewDriver raise only exceptions that end the run, such as KeyboardInterrupt.
    """

    def __init__(self, make_view: MakeView, commands: CommandQueue, pending_call: PendingCall) -> None:
        self._commands = commands
        self._pending_call = pending_call
        self._request: StatusRequest | None = None  # that has not been answered
        self._view: View | None = None
        self._due_at = 0.0  # when the next update is due
        self._close_count = 0
        self._guard(lambda: self._open_view(make_view))

    def seconds_to_next_update(self) -> float | None:
        """Return how long the caller's thread may sleep before the next update.

        Return None if the caller's thread may sleep until another thread wakes it up.
        """
        if self._view is None or self._request is not None or self._due_at == math.inf:
            return None
        return max(0.0, self._due_at - monotonic())

    def update(self) -> None:
        """Show the statuses that the watcher thread has sent, or request new statuses if an update is due."""
        if self._view is None:
            return
        if self._request is None:
            if monotonic() >= self._due_at:
                self._request = StatusRequest()
                self._commands.post(self._request)
        elif self._request.statuses is not None:
            statuses, self._request = self._request.statuses, None
            called = self._pending_call.ranks
            shown = [status for status in statuses if called is None or status.rank in called]
            self._guard(lambda: self._show(shown))

    def pause(self) -> None:
        """Release the view's rows of the terminal, because a debugger's prompt or a shell uses the terminal.

        The view stays hidden until the next update.
        """
        view = self._view
        if view is not None:
            self._guard(view.pause)

    def resume(self) -> None:
        """After `pause`, schedule an immediate update, so that the view is drawn again."""
        if self._due_at < math.inf:
            self._due_at = 0.0

    def close(self) -> None:
        """Close the view, because the call is over or an exception has ended the call.

        If an exception such as KeyboardInterrupt interrupts `close`, the BlockingCall calls `close` again. The second call
        of `close` closes the view again, because the first call has perhaps not restored the terminal. A third call of
        `close` does not call `View.close` again. Otherwise a view that always raises KeyboardInterrupt would prevent the
        rest of the cleanup.
        """
        view = self._view
        self._close_count += 1
        if view is not None and self._close_count <= MAX_CLOSES:
            self._guard(lambda: self._close_view(view))
        self._view = None

    def _open_view(self, make_view: MakeView) -> None:
        self._view = make_view()
        self._schedule_update()

    def _show(self, statuses: Sequence[RankStatus]) -> None:
        if self._view is not None:
            self._view.show(statuses)
            self._schedule_update()

    def _close_view(self, view: View) -> None:
        view.close(final_statuses(self._pending_call.observations))

    def _schedule_update(self) -> None:
        if self._view is not None:
            self._due_at = monotonic() + self._view.period

    def _guard(self, do: Callable[[], None]) -> None:
        """Call a function that uses the view. If the function raises an exception, remove the view and log a warning.

        If the exception belongs to a class in the tuple ENDS_RUN, such as KeyboardInterrupt, keep the view and raise the
        exception again.
        """
        try:
            do()
        except ENDS_RUN:
            self._due_at = math.inf  # a view that raises at each update would interrupt the end of the run again and again
            raise
        except BaseException as error:  # noqa: BLE001  a view must not end the run
            view, self._view = self._view, None
            with ignore_user_errors():  # so that the view releases its rows of the terminal, if it still can
                if view is not None:
                    view.close(())
            log_now(logging.WARNING, "the live view failed; the run goes on without it", error=error)
