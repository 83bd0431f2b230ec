"""Shows the ranks of all nodes in the live view of the driver's program."""

import math
from collections.abc import Sequence
from dataclasses import replace

from mpwatch.live_view.select import may_show, select_view
from mpwatch.results.model import RankStatus

NODE_PERIOD = 0.5  # seconds between two statuses that a node sends


class JobView:
    """The live view of one job, in the driver's thread."""

    def __init__(self, progress: bool | None) -> None:
        self.node_period = NODE_PERIOD if may_show(progress) else None
        self._of_nodes: dict[int, list[RankStatus]] = {}  # the latest statuses, by number of the node
        self._view = select_view(progress, lambda show: show(self._list_statuses()))

    @property
    def next_update_at(self) -> float:
        return math.inf if self._view is None else self._view.next_update_at

    def update(self) -> None:
        if self._view is not None:
            self._view.update()

    def close(self) -> None:
        if self._view is not None:
            self._view.close(self._list_statuses())

    def put(self, node: int, statuses: Sequence[RankStatus]) -> None:
        self._of_nodes[node] = [replace(status, node=node) for status in statuses]

    def drop(self, node: int) -> None:
        self._of_nodes.pop(node, None)

    def _list_statuses(self) -> list[RankStatus]:
        found = [status for statuses in self._of_nodes.values() for status in statuses]
        return sorted(found, key=lambda status: status.rank)
