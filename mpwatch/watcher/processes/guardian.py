"""The watcher's end of the guardian: starts it, tells it which process groups to kill, and which terminal to put in order,
should the watcher die.
"""

import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from multiprocessing import spawn
from pathlib import Path

from mpwatch.os_support.processes import open_pidfd
from mpwatch.watcher.observers.deferred_log import DeferredLog

PROGRAM = Path(__file__).parents[2] / "guardian" / "main.py"


class Guardian:
    """From its making on, every group that is put under guard dies with this process. Close it when all are reaped.

    Raises OSError if it cannot be started.
    """

    def __init__(self, deferred_log: DeferredLog) -> None:
        self._deferred_log = deferred_log
        self._is_lost = False
        with ExitStack() as passed, ExitStack() as kept:
            self._line, theirs = socket.socketpair()
            passed.enter_context(theirs)
            kept.enter_context(self._line)
            self._line.settimeout(1.0)  # should somebody have stopped it
            us = open_pidfd(os.getpid())
            if us is not None:
                passed.callback(os.close, us)
            fds = [theirs.fileno()] if us is None else [theirs.fileno(), us]
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

    def entrust(self, repair: tuple[str, bytes] | None) -> None:
        """This is to be written to the terminal of that name, which has a view in it; None: it has none any more."""
        terminal, text = repair or ("", b"")
        self._tell(b"=%s\n" % (text.hex().encode() + b" " + os.fsencode(terminal) if repair else b""))

    def _tell(self, line: bytes) -> None:
        try:
            # not a pipe: the host's SIGPIPE may be at its default, and would end it
            self._line.send(line, getattr(socket, "MSG_NOSIGNAL", 0))
        except OSError as error:
            if not self._is_lost:
                text = "the guardian is gone (%s): should this process be killed, its ranks may outlive it"
                self._deferred_log.warning(text, error)
            self._is_lost = True

    def close(self) -> None:
        """End it; nothing is under guard any more. Waits for it, which takes no time: it is killed."""
        self._line.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
