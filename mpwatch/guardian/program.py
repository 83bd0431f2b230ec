r"""Kills the process groups of a run whose watcher has died. A script, run by a bare interpreter: standard library only.

    watcher --- "+1234\n" a rank has started, "-1234\n" it is dead and reaped ---> guardian

The second of two ways; the first is the kernel's (platform.die_with_writer), which a rank arranges for itself. This one
needs nothing of the rank, so it is there from the rank's start, and reaches one that has closed the pipe, has gone to
another group or has become another program; and it asks no more of the system than processes and sockets. (The kernel's
death signal for children follows the thread that made the rank, and not the process. A watching thread in the rank would
not run while C code holds the GIL or the rank is stopped.)

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
