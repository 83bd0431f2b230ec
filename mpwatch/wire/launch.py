"""A rank as a multiprocessing.Process of the spawn context, and the data that it is started with.

The watcher pickles a RankProcess and starts it (watcher/process.py). In the child, spawn's `_bootstrap` calls `run`.
"""

from __future__ import annotations

from importlib import import_module
from multiprocessing.context import SpawnProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class LaunchInfo:
    """The data that a rank is started with: its Worker, and what its descriptors are for."""

    __slots__ = ("channel_fd", "is_captured", "slot", "slots_fd", "stderr_fd", "worker")

    def __init__(
        self, worker: dict[str, object], channel_fd: int, slots_fd: int, slot: int, stderr_fd: int, *, is_captured: bool
    ) -> None:
        self.worker = worker  # its fields; importing the class takes time, and many ranks never need it
        self.channel_fd = channel_fd
        self.slots_fd = slots_fd
        self.slot = slot  # number of the rank's slot in that file, see slots.py
        self.stderr_fd = stderr_fd  # becomes stderr once the rank is ready, see worker/streams.py
        self.is_captured = is_captured  # whether output goes to files or to the watcher


class RankProcess(SpawnProcess):
    """The rank's process, as the child sees it.

    Args:
        seat: passed to the program.
        program: module whose `main` the rank runs. It is a name, because the watcher never imports that module.
        name: of the process.
        start_method: spawn makes it the child's default; None leaves the default alone.
    """

    def __init__(self, launch_info: LaunchInfo, program: str, *, name: str, start_method: str | None) -> None:
        super().__init__(name=name)
        self.launch_info = launch_info
        self.program = program
        self._start_method: Any = start_method  # read by spawn; typeshed: str

    def run(self) -> None:
        """Run the program."""
        import_module(self.program).main(self.launch_info)
