"""Starts the guardian process and sends it orders. Runs in the watcher thread.

If the calling program is killed, the guardian kills the process groups that it was told. See guardian/main.py for the format
of the orders.
"""

import os
import signal
import socket
from contextlib import ExitStack, suppress
from multiprocessing import spawn
from pathlib import Path

from mpwatch.os_support.descriptors import MSG_NOSIGNAL
from mpwatch.os_support.processes import open_pidfd, peek_exit_code, start_process
from mpwatch.watcher.processes.rank_environment import copy_environment

PROGRAM = Path(__file__).parents[2] / "guardian" / "main.py"


class Guardian:
    """Closed when all ranks are reaped."""

    def __init__(self) -> None:
        with ExitStack() as passed, ExitStack() as kept:
            self._socket, guardian_end = socket.socketpair()
            kept.enter_context(self._socket)
            self._socket.settimeout(1.0)  # the guardian may have been stopped by SIGSTOP
            fds = [passed.enter_context(guardian_end).fileno()]
            if (own_pidfd := open_pidfd(os.getpid())) is not None:
                passed.callback(os.close, own_pidfd)
                fds.append(own_pidfd)
            devnull = os.open(os.devnull, os.O_RDWR)
            passed.callback(os.close, devnull)
            command = [
                *(os.fsdecode(spawn.get_executable()), "-I", "-S", str(PROGRAM), ",".join(map(str, fds))),
                *("mpwatch", "guardian", f"of={os.getpid()}"),  # for `ps`
            ]
            self._pid = start_process(command, copy_environment(), fds, stdout=devnull, stderr=devnull)
            kept.pop_all()

    def guard(self, pgid: int) -> None:
        """Make the guardian kill this process group if the calling program dies."""
        self._send(b"+%d\n" % pgid)

    def release(self, pgid: int) -> None:
        """Cancel the order to kill this process group, because the group is dead and a new group can get its number."""
        self._send(b"-%d\n" % pgid)

    def _send(self, line: bytes) -> None:
        with suppress(OSError):  # the guardian is gone: the kernel alone kills the ranks
            # A write to a pipe could end the calling program, because its SIGPIPE may have the default action.
            self._socket.send(line, MSG_NOSIGNAL)

    def close(self) -> None:
        """Kill the guardian process and reap it, so that the guardian kills no process group."""
        with suppress(ChildProcessError):  # other code of the program has reaped it, so another process may have its pid
            peek_exit_code(self._pid)
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._socket.close()  # last: a live guardian would take it for the death of this process, and kill the groups
