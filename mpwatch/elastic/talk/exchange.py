"""How the nodes of a job that has succeeded get one another's values: each writes its own, and reads those of the others.

    caller's thread   pack --> exchange ------------------------------------> unpack: code of the user's runs here
    link                         `--> begin, and step by step what has come --^

Each step does what can be done without waiting. One that cannot send its values tells the others why.
"""

import threading
from collections.abc import Mapping, Sequence

from . import seal
from .board import Board
from .seal import ForgedError

__all__ = ["Exchange", "ExchangeError"]


class ExchangeError(Exception):
    """Not all values can be had: says whose, and why."""


class Exchange:
    """Of one node.

    Args:
        parts: this node's values, as they are written.
        trouble: why there are none.
        size: how many nodes there are.
        attempt: that has succeeded.
        world_size: how many ranks there are.
    """

    def __init__(self, parts: Sequence[bytes], trouble: str, *, size: int, attempt: int, world_size: int) -> None:
        self._parts, self._trouble = parts, trouble
        self._size, self._attempt, self._world_size = size, attempt, world_size
        self._missing = set(range(size))
        self._why = ""
        self._is_done = threading.Event()
        self.found: dict[int, tuple[bytes, range]] = {}
        """By node: its values, and of which ranks they should be."""

    def wait(self, seconds: float) -> Mapping[int, tuple[bytes, range]]:
        """What the others have written. Raises ExchangeError if it does not come to that in time."""
        has_come = self._is_done.wait(seconds)
        if self._why:
            raise ExchangeError(self._why)
        if not has_come:
            nodes = ", ".join(map(str, sorted(self._missing)))
            raise ExchangeError(f"the values of these nodes have not come after {seconds:g} s: {nodes}")
        return self.found

    def begin(self, board: Board) -> None:
        """Write what the others want."""
        self._missing.discard(board.group_rank)
        if self._trouble:
            board.say_of_values({"parts": 0, "error": seal.without_controls(self._trouble[:1000])})
            self.end(f"node {board.group_rank}: {self._trouble}")
        else:
            board.write_values(self._parts)

    def step(self, board: Board) -> bool:
        """Read what has come. Whether nothing is left to do."""
        try:
            for node in sorted(self._missing):
                if self._is_done.is_set():
                    break
                self._read(board, node)
        except ForgedError as error:
            self.end(f"the values of a node are not what they should be: {error}")
        if not self._missing:
            self.end("")
        return self._is_done.is_set()

    def end(self, why: str) -> None:
        """Nothing more will come."""
        if not self._is_done.is_set():
            self._why = why
            self._is_done.set()

    def _read(self, board: Board, node: int) -> None:
        said = board.said_of_values(node)
        if said is None:
            return
        if trouble := seal.text(said, "error"):
            self.end(f"node {node}: {trouble}")
            return
        self.found[node] = board.values_of(node, said), self._ranks_of(board, node)
        self._missing.discard(node)

    def _ranks_of(self, board: Board, node: int) -> range:
        is_last = node + 1 == self._size
        return range(self._first_rank(board, node), self._world_size if is_last else self._first_rank(board, node + 1))

    def _first_rank(self, board: Board, node: int) -> int:
        place = board.place(self._attempt, node)
        if place is None:
            raise ForgedError(f"who the ranks of node {node} are, is not known")
        return place.rank
