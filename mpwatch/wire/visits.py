"""How another program of the same user asks a watcher for what it sees.

    /tmp/mpwatch-<uid>/<pid>-<random>-<version>.sock: one for each run and WorkerGroup

    visitor --- one question in JSON, such as {"ask": "stacks"} --------------> watcher
    visitor <--- one byte, with the descriptor of a file that has a pickle ---- watcher

The folder is in /tmp for all, since a job of a scheduler and a terminal may differ in TMPDIR and XDG_RUNTIME_DIR. Only its
user may enter it, and both ends check who the other one is: whoever unpickles trusts the other.
"""

import json
import os
import pickle
import socket
import stat
from collections.abc import Mapping
from typing import Any

from mpwatch.os_support.descriptors import MSG_NOSIGNAL, read_peer, receive_with_fds

SUFFIX = ".sock"


def find_folder() -> str:
    return f"/tmp/mpwatch-{os.geteuid()}"  # noqa: S108  `check_folder`


def check_folder(folder: str) -> None:
    """Raise PermissionError if others may have made this folder, or may enter it. Raises OSError."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user may enter; remove it")


def check_peer(connection: socket.socket) -> int:
    """Return the pid of the other end, or 0 if the system does not tell. Raises PermissionError if it is another user's."""
    pid, uid = read_peer(connection) or (0, os.geteuid())
    if uid != os.geteuid():
        raise PermissionError(f"the other end of the socket is a program of user {uid}")
    return pid


def receive_fd(watcher: socket.socket) -> int:
    """Raises OSError: TimeoutError if none comes. EOFError: the watcher has ended."""
    _, fds, _ = receive_with_fds(watcher, 1, 1)
    if not fds:
        raise EOFError
    return fds[0]


def ask(watcher: socket.socket, question: Mapping[str, Any]) -> Any:
    """Raises as `receive_fd`."""
    watcher.sendall(json.dumps(question).encode(), MSG_NOSIGNAL)
    with open(receive_fd(watcher), "rb") as file:
        return pickle.loads(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0))
