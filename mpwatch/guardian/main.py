r"""Kills the process groups of a run whose watcher has died, and gives a terminal back that it had a live view in. A script,
run by a bare interpreter: standard library only.

    watcher --- "+1234\n" a rank has started, "-1234\n" it is dead and reaped ---> guardian
                "=1b5b72 /dev/pts/0\n" what puts that terminal in order, "=\n" it is

The second of two ways; the first is the kernel's (die_with_writer in os_support), which a rank arranges for itself. This one
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

TRIES, TRY_SECONDS = 10, 0.1  # for a terminal that takes nothing at the moment


def main(line: int, watcher: int | None = None) -> None:
    """Read until the watcher has gone, then kill what is still under guard."""
    os.set_blocking(line, False)
    groups: set[int] = set()
    repair = rest = b""
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
            if word[:1] == b"=":
                repair = word[1:]
            else:
                (groups.add if word[:1] == b"+" else groups.discard)(int(word[1:]))
    for group in groups:
        for kill in (os.kill, os.killpg):  # the rank itself may have gone to another group
            try:
                kill(group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it ended together with the watcher
    if repair:
        try:
            put_in_order(*repair.split(b" ", 1))
        except OSError:
            pass  # the terminal has gone, too


def put_in_order(text: bytes, terminal: bytes) -> None:
    """Write this, in hexadecimal digits, to the terminal of that name, in one go."""
    fd = os.open(terminal, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    for _ in range(TRIES):
        if poll.poll(TRY_SECONDS * 1000):
            try:
                os.write(fd, bytes.fromhex(text.decode()))
                return
            except BlockingIOError:
                pass  # somebody else was writing


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
