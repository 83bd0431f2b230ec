"""Each run has one guardian process. If the watcher is killed, the guardian kills the ranks.

This script runs in a bare interpreter (`python -I -S`), so it imports only the standard library.

    watcher --- socket pair: one line for each order ---> guardian --- SIGKILL, when the watcher is gone ---> ranks

    "+1234" and a newline    a rank has started: kill process group 1234 if the watcher dies
    "-1234" and a newline    that rank is dead and reaped: do not kill its group

The kernel kills the ranks, too (`die_with_writer` in os_support/signals.py), but not one that has closed its pipe, has
joined another group or has replaced its program. Two other ways are not reliable: PR_SET_PDEATHSIG kills a rank when the
thread ends that has started it, and a thread of the rank cannot react while C code holds the GIL, or while it is suspended.

The socket keeps what was not read yet, even after the watcher's death. A forked child of the program can keep the socket
open, so the guardian also watches a pidfd.
"""

import os
import select
import signal
import sys


def main(orders: int, watcher: int | None = None) -> None:
    """`orders` is the socket. `watcher` is a pidfd, or None if the system has no pidfds."""
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
