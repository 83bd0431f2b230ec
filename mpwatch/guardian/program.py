r"""Kills the process groups of a run whose watcher has died. A script, run by a bare interpreter: standard library only.

    watcher --- "+1234\n" a rank has started, "-1234\n" it is dead and reaped ---> guardian

The kernel's own death signal reaches a rank but not what the rank has started, follows the thread that made the rank
rather than the process, and costs every rank an import of ctypes. A watching thread in the rank cannot run while C code
holds the GIL or the rank is stopped. A process that waits for the pipe's end has none of these faults.

The pipe keeps what was written to it after the writer's death, so a group is under guard from the moment it was written,
even if this program has not yet started to read. A copy of the pipe in a forked child of the watcher's program would keep
it open: where there are pidfds, the watcher's own is waited for as well.
"""

import os
import select
import signal
import sys


def main(pipe: int, watcher: int | None = None) -> None:
    """Read until the watcher has gone, then kill what is still under guard."""
    os.set_blocking(pipe, False)
    groups: set[int] = set()
    rest = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    if watcher is not None:
        poll.register(watcher, select.POLLIN)
    gone = False
    while not gone:
        gone = any(fd == watcher for fd, _ in poll.poll())
        data = read_all(pipe)
        gone = gone or data is None
        *lines, rest = (rest + (data or b"")).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it ended together with the watcher


def read_all(pipe: int) -> bytes | None:
    """What is in the pipe now; None if that is nothing, for ever."""
    data = b""
    while True:
        try:
            more = os.read(pipe, 65536)
        except BlockingIOError:
            return data
        if not more:
            return data or None
        data += more


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
