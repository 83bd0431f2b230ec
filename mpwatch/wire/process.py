"""A rank as a multiprocessing.Process of the spawn context: the object that both sides have a copy of.

The watcher starts it (watcher/process.py says how); in the child, spawn's own `_bootstrap` calls `run`.
"""

from __future__ import annotations

from importlib import import_module
from multiprocessing.context import SpawnProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["RankProcess", "Seat"]


class Seat:
    """What a rank is told before it is told anything else: who it is, and what its descriptors are for."""

    __slots__ = ("channel_fd", "is_captured", "slot", "slots_fd", "stderr_fd", "worker")

    def __init__(
        self, worker: dict[str, object], channel_fd: int, slots_fd: int, slot: int, stderr_fd: int, *, is_captured: bool
    ) -> None:
        self.worker = worker  # the fields of spec.Worker, which costs an import that many ranks never need
        self.channel_fd = channel_fd
        self.slots_fd = slots_fd
        self.slot = slot  # which of them, see slots.py
        self.stderr_fd = stderr_fd  # what is to be its stderr once it is ready, see worker/streams.py
        self.is_captured = is_captured  # whether what it prints goes to files, or to the caller by way of the watcher


class RankProcess(SpawnProcess):
    """The child's side. `_start_method` is what spawn makes the child's default: the caller's, where it has chosen one."""

    def __init__(self, seat: Seat, *, name: str, start_method: str | None) -> None:
        super().__init__(name=name)
        self.seat = seat
        self._start_method: Any = start_method  # typeshed: str; None leaves the default alone

    def run(self) -> None:
        """Serve the watcher's calls until it says END."""
        # By name: the watcher must not import what runs in a rank, and this module is imported by both.
        import_module("mpwatch.worker.bootstrap").main(self.seat)
