"""What the watcher passes to a new rank, whose interpreter calls `RankProcess.run`."""

from __future__ import annotations

from importlib import import_module
from multiprocessing.context import SpawnProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class LaunchInfo:
    def __init__(
        self,
        worker: dict[str, object],
        channel_fd: int,
        slots_fd: int,
        slot: int,
        stderr_fd: int,
        *,
        is_captured: bool,
        capture_locals: bool = False,
        post_mortem: bool = False,
        preload: tuple[str, ...] = (),
        ignored_signals: tuple[int, ...] = (),
        guardian_fds: tuple[int, ...] = (),
    ) -> None:
        self.worker = worker  # the fields of the Worker: importing its class takes time, and many ranks never need it
        self.channel_fd = channel_fd
        self.slots_fd = slots_fd  # the memory file, see shared_memory.py
        self.slot = slot  # number of the rank's slot in that file
        self.stderr_fd = stderr_fd  # becomes stderr when the rank is ready, see worker/stdio.py
        self.is_captured = is_captured  # whether the output goes to files or to the watcher
        self.capture_locals = capture_locals  # see mpwatch.run
        self.post_mortem = post_mortem  # see mpwatch.run
        self.preload = preload  # see mpwatch.WorkerGroup
        self.ignored_signals = ignored_signals  # signals that are only for the watcher, see ProcessPool
        self.guardian_fds = guardian_fds  # see Guardian.fds_for_ranks


class RankProcess(SpawnProcess):
    """The process of a rank, which runs `main(launch_info)` of the module `program`. In the watcher, a subclass starts and
    signals it (watcher/processes/process.py). `start_method` is the child's default.
    """

    def __init__(self, launch_info: LaunchInfo, program: str, *, name: str, start_method: str | None) -> None:
        super().__init__(name=name)
        self.launch_info = launch_info
        self.program = program
        self._start_method: Any = start_method  # spawn sets it in the child; typeshed says: str

    def run(self) -> None:
        import_module(self.program).main(self.launch_info)
