"""Each run has one guardian process. If the watcher is killed, the guardian kills the ranks.

This script runs in a bare interpreter (`python -I -S`), so it imports only the standard library. The watcher starts this
script: see watcher/processes/guardian.py.

    watcher --- socket pair: one line for each order ---> guardian --- SIGKILL, when the watcher is gone ---> ranks

    "+1234" and a newline    a rank has started: kill process group 1234 if the watcher dies (the rank sends it, too)
    "-1234" and a newline    that rank is dead and reaped: do not kill its group

If the watcher dies, both the kernel and the guardian kill the ranks. The watcher holds the write end of a pipe to each rank.
When the write end is closed, the kernel kills the Unix process group of the rank (`die_with_writer` in
os_support/signals.py). The guardian does not depend on code in the rank, so it works as soon as the process of the rank
exists. The guardian also kills a rank that has closed its pipe, has joined another Unix process group, or has replaced its
program (`exec`). The guardian needs no features of the operating system except processes and sockets.

Two other ways of killing the ranks after the watcher's death are not reliable. PR_SET_PDEATHSIG kills a rank at the end of
the thread that started the rank, and not at the end of the watcher's process. A thread in the rank cannot react to the
watcher's death while C code holds the GIL, or while the rank is suspended.

The socket keeps bytes that were not read yet, so the guardian reads every order, even after the watcher's death. A child
process that the watcher has forked can keep the watcher's socket open after the watcher's death. With a pidfd, the guardian
notices the watcher's death even if the socket stays open.
"""

import os
import select
import signal
import sys


def main(orders: int, watcher: int | None = None) -> None:
    """Read orders until the watcher is gone, and then kill the Unix process groups of the ranks.

    Args:
        orders: descriptor of the socket.
        watcher: pidfd of the watcher, or None if the system has no pidfds.
    """
    os.set_blocking(orders, False)
    groups: set[int] = set()
    rest = b""
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    if watcher is not None:
        poll.register(watcher, select.POLLIN)
    is_watcher_gone = False
    while not is_watcher_gone:
        is_watcher_gone = any(fd == watcher for fd, _ in poll.poll())
        data = read_available(orders)
        is_watcher_gone = is_watcher_gone or data is None
        *lines, rest = (rest + (data or b"")).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups - {0, 1}:  # these numbers stand for many processes, see kill(2)
        for kill in (os.kill, os.killpg):  # the rank itself may have joined another group
            try:
                kill(group, signal.SIGKILL)
            except OSError:
                pass  # the rank has ended together with the watcher


def read_available(orders: int) -> bytes | None:
    """Return the bytes that have arrived, or None at the end of the stream."""
    data = b""
    while True:
        try:
            more = os.read(orders, 65536)
        except BlockingIOError:
            return data
        if not more:
            return data or None
        data += more


if __name__ == "__main__":
    os.setsid()  # it survives a signal to the calling program's group, and the loss of the terminal
    os.chdir("/")
    main(*map(int, sys.argv[1].split(",")))
