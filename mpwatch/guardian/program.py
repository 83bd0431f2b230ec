r"""Kills the process groups of a run whose watcher has died. A script, run by a bare interpreter: standard library only.

    watcher --- "+1234\n" a rank has started, "-1234\n" it is dead and reaped ---> guardian

The kernel's own death signal reaches a rank but not what the rank has started, follows the thread that made the rank
rather than the process, and costs every rank an import of ctypes. A watching thread in the rank cannot run while C code
holds the GIL or the rank is stopped. A process that waits for the line's end has none of these faults.

The line keeps what was sent on it after the sender's death, so a group is under guard from the moment it was written,
even if this program has not yet started to read. A copy of the line in a forked child of the watcher's program would keep
it open: where there are pidfds, the watcher's own is waited for as well.
"""

import os
import select
import signal
import sys


def main(line: int, watcher: int | None = None) -> None:
    """Read until the watcher has gone, then kill what is still under guard."""
    os.set_blocking(line, False)
    groups: set[int] = set()
    rest = b""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    if watcher is not None:
        poll.register(watcher, select.POLLIN)
    gone = False
    while not gone:
        gone = any(fd == watcher for fd, _ in poll.poll())
        data = read_all(line)
        gone = gone or data is None
        *words, rest = (rest + (data or b"")).split(b"\n")
        for word in words:
            (groups.add if word[:1] == b"+" else groups.discard)(int(word[1:]))
    for group in groups:
        for kill in (os.kill, os.killpg):  # the rank itself may have gone to another group
            try:
                kill(group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it ended together with the watcher


def read_all(line: int) -> bytes | None:
    """What has come by now; None if that is nothing, for ever."""
    data = b""
    while True:
        try:
            more = os.read(line, 65536)
        except BlockingIOError:
            return data
        if not more:
            return data or None
        data += more


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
