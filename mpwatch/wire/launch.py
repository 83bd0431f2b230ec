"""What the watcher passes to a new rank, whose interpreter calls `RankProcess.run`."""

from importlib import import_module
from multiprocessing.context import SpawnProcess
from types import SimpleNamespace


class LaunchInfo(SimpleNamespace):
    worker: dict[str, object]  # the fields of the Worker: importing its class takes time, and many ranks never need it
    channel_fd: int
    slots_fd: int  # the memory file, see shared_memory.py
    slot: int  # number of the rank's slot in that file
    stderr_fd: int  # becomes stderr when the rank is ready, see worker/stdio.py
    stack_fd: int  # the pipe for stack dumps
    is_captured: bool  # whether the output goes to files or to the watcher
    debug: str | None  # see mpwatch.run
    preload: tuple[str, ...]  # see mpwatch.WorkerGroup
    ignored_signals: tuple[int, ...]  # signals that are only for the watcher, see ProcessPool


class RankProcess(SpawnProcess):
    """The process of a rank, which runs `main(launch_info)` of the module `program`. The watcher's RankPopen starts and
    signals it (watcher/processes/process.py). `start_method` is the child's default.
    """

    def __init__(self, launch_info: LaunchInfo, program: str, *, name: str, start_method: str | None) -> None:
        super().__init__(name=name, daemon=False)
        self.launch_info = launch_info
        self.program = program
        self._start_method = start_method  # type: ignore[assignment]  # spawn sets it in the child; typeshed says: str

    def run(self) -> None:
        import_module(self.program).main(self.launch_info)
