"""Shows the ranks of all nodes in the live view of the driver's program."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from mpwatch.live_view.live import LiveView
from mpwatch.live_view.select import may_show, select_view
from mpwatch.os_support.clock import monotonic
from mpwatch.results.model import RankStatus
from mpwatch.watcher.observers.deferred_log import log_now
from mpwatch.wire.exceptions.decoder import USER_ERRORS

NODE_PERIOD = 0.5  # seconds between two statuses that a node sends


class JobView:
    """The live view of one job. Any thread may call `put`, and only the driver's thread the other methods."""

    def __init__(self, progress: bool | None) -> None:
        self.node_period = NODE_PERIOD if may_show(progress) else None
        self._statuses: dict[int, list[RankStatus]] = {}  # the latest ones, by number of the node
        self._due_at = 0.0
        self._view: LiveView | None = None
        self._guard(lambda: self._open(progress))

    def put(self, node: int, statuses: Sequence[RankStatus]) -> None:
        self._statuses[node] = [replace(status, node=node) for status in statuses]

    def drop(self, node: int) -> None:
        self._statuses.pop(node, None)

    def seconds_to_next_update(self) -> float:
        return math.inf if self._view is None else max(0.0, self._due_at - monotonic())

    def update(self) -> None:
        if self._view is not None and monotonic() >= self._due_at:
            self._guard(self._show)

    def close(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            self._guard(lambda: view.close(self._sort()))

    def _open(self, progress: bool | None) -> None:
        self._view = select_view(progress)
        self._due_at = monotonic() + (0.0 if self._view is None else self._view.period)

    def _show(self) -> None:
        assert self._view is not None
        self._view.show(self._sort())
        self._due_at = monotonic() + self._view.period

    def _sort(self) -> list[RankStatus]:
        nodes = list(self._statuses.values())  # a copy: a node may send its first statuses meanwhile
        return sorted((status for statuses in nodes for status in statuses), key=lambda status: status.rank)

    def _guard(self, do: Callable[[], None]) -> None:
        """If drawing raises, close the view and log a warning: that must not end the job."""
        try:
            do()
        except USER_ERRORS as error:  # see above
            view, self._view = self._view, None
            with suppress(*USER_ERRORS):
                if view is not None:
                    view.close(())
            log_now(logging.WARNING, "the live view failed; the run goes on without it", error=error)
