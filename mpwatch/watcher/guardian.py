"""The watcher's end of the guardian: starts it, tells it which process groups to kill should the watcher die."""

import os
import signal
import subprocess
from contextlib import ExitStack, suppress
from multiprocessing import spawn
from pathlib import Path

from ..platform import open_pidfd

__all__ = ["Guardian"]

PROGRAM = Path(__file__).parent.parent / "guardian" / "program.py"


class Guardian:
    """From its making on, every group that is put under guard dies with this process. Close it when all are reaped.

    Raises OSError if it cannot be started.
    """

    def __init__(self) -> None:
        with ExitStack() as passed, ExitStack() as kept:
            read_end, self._pipe = os.pipe()
            passed.callback(os.close, read_end)
            kept.callback(os.close, self._pipe)
            us = open_pidfd(os.getpid())
            if us is not None:
                passed.callback(os.close, us)
            fds = [read_end] if us is None else [read_end, us]
            self._process = subprocess.Popen(
                [os.fsdecode(spawn.get_executable()), "-I", "-S", str(PROGRAM), *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=fds,
                start_new_session=True,  # what kills our process group or takes our terminal leaves it alive
            )
            kept.pop_all()

    def guard(self, pgid: int) -> None:
        """This group is not to outlive us."""
        self._tell(b"+%d\n" % pgid)

    def release(self, pgid: int) -> None:
        """This group is dead, and its number may soon be somebody else's."""
        self._tell(b"-%d\n" % pgid)

    def _tell(self, line: bytes) -> None:
        with suppress(BrokenPipeError):  # somebody killed it; the ranks still end when their channels close
            os.write(self._pipe, line)

    def close(self) -> None:
        """End it; nothing is under guard any more. Waits for it, which takes no time: it is killed."""
        os.close(self._pipe)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
