r"""Each run has one guardian process. If the watcher is killed, the guardian kills the ranks and restores the terminal.

This script runs in a bare interpreter (`python -I -S`), so it imports only the standard library. The watcher starts this
script: see watcher/processes/guardian.py.

    watcher --- socket pair: one line for each order ---> guardian --- SIGKILL, when the watcher is gone ---> ranks

    "+1234\n"                 a rank has started: kill process group 1234 if the watcher dies (the rank sends it, too)
    "-1234\n"                 that rank is dead and reaped: do not kill its group
    "=1b5b72 /dev/pts/0\n"    a live view is on this terminal: write these bytes (hexadecimal) to it if the watcher dies
    "=\n"                     no terminal has to be restored
    "~[...] /dev/pts/0\n"     a prompt is open on this terminal: set these modes (tcgetattr's values as JSON) if it dies
    "~\n"                     no modes have to be restored

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

TRIES, TRY_SECONDS = 10, 0.1  # if a terminal accepts no output at the moment


def main(orders: int, watcher: int | None = None) -> None:
    """Read orders until the watcher is gone, and then kill the Unix process groups of the ranks and restore the terminal.

    Args:
        orders: descriptor of the socket.
        watcher: pidfd of the watcher, or None if the system has no pidfds.
    """
    os.set_blocking(orders, False)
    groups: set[int] = set()
    restore = modes = rest = b""
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
            if line[:1] == b"=":
                restore = line[1:]
            elif line[:1] == b"~":
                modes = line[1:]
            else:
                (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups - {0, 1}:  # these numbers stand for many processes, see kill(2)
        for kill in (os.kill, os.killpg):  # the rank itself may have joined another group
            try:
                kill(group, signal.SIGKILL)
            except OSError:
                pass  # the rank has ended together with the watcher
    if restore:
        try:
            restore_terminal(*restore.split(b" ", 1))
        except OSError:
            pass  # the terminal is gone, too
    if modes:
        restore_modes(*modes.rsplit(b" ", 1))


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


def restore_terminal(data: bytes, path: bytes) -> None:
    """Decode the hexadecimal `data`, and write the decoded bytes to the terminal `path`, such as "/dev/pts/0"."""
    fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    rest = bytes.fromhex(data.decode())
    tries = TRIES
    while rest and tries:
        tries -= 1
        if poll.poll(TRY_SECONDS * 1000):
            try:
                rest = rest[os.write(fd, rest) :]  # mostly all at once, so that no other output gets in between
            except BlockingIOError:
                pass  # another process filled the terminal's buffer first


def restore_modes(modes: bytes, path: bytes) -> None:
    """Set the modes of the terminal at `path`. For example, a mode says whether the terminal shows typed characters."""
    import json
    import termios

    *numbers, characters = json.loads(modes)
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        termios.tcsetattr(fd, termios.TCSANOW, [*numbers, [bytes.fromhex(character) for character in characters]])
    except (OSError, termios.error):
        pass  # the terminal is gone, too


if __name__ == "__main__":
    os.setsid()  # it survives a signal to the calling program's group, and the loss of the terminal
    os.chdir("/")
    main(*map(int, sys.argv[1].split(",")))
