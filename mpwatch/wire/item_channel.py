"""The messages of `mpwatch.map` between the caller and a rank. The caller sends items, and the rank sends return values.

    caller                                   rank
      | <-------------- READY ---------------- |   the rank has loaded the function
      | ------------ ITEM | ITEMS -----------> |   one item, or several
      | <-------------- VALUE ---------------- |   one for each item, before the next item begins
      | <------------- DIVIDE ---------------- |   instead, if ITEMS cannot be unpickled: send them one by one
      | ----------- end of the stream -------> |   there are no more items

Each rank has a separate socket for the messages of `mpwatch.map`, so these messages do not pass through the watcher thread.
If a rank dies, the caller can still read the rank's last messages from the socket. The last messages show at which item the
rank died.

Each item has a number, which is called its token. Each rank has a pipe, which contains the tokens of the rank's items in
ascending order. Before a rank begins an item, the rank takes the item's token from the rank's pipe. The caller can take a
token from the pipe of a busy rank, and send the token's item to another rank. When a rank has died, the tokens in its pipe
show which items the rank had not begun. The message ITEM contains an item and its token. The message ITEMS contains several
items, but only the token of the first item. If the first item has the token 7, the next items have the tokens 8, 9 and so
on.

The socket has the type SOCK_SEQPACKET, which keeps the boundaries between messages. Large pickled data are sent in a file,
whose descriptor is sent with the message (pickling/packed.py).
"""

from __future__ import annotations

import enum
import os
import socket
import struct
from multiprocessing.connection import Pipe

from mpwatch.os_support.descriptors import MSG_NOSIGNAL, receive_with_fds
from mpwatch.wire.messages import MAX_DESCRIPTORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    ItemMessage = tuple["ItemKind", bytes, list[int] | None]

TOKEN = struct.Struct("<Q")
MAX_TOKENS = 512  # of 8 bytes. Every system's pipe takes this many bytes at once, and in one piece (PIPE_BUF)
READ_SIZE = 1 << 17  # bytes; a packed value in the message itself has at most half of that


class ItemKind(enum.IntEnum):
    """The kind of a message. The comment beside a kind describes the message's body."""

    READY = 1  # empty
    ITEM = 2  # the packed call whose arguments are a token and the item; empty if the first descriptor is its file
    ITEMS = 3  # the same for several items
    VALUE = 4  # a packed value; empty if the descriptor is its file
    DIVIDE = 5  # empty


class TokenPipe:
    """A pipe that contains the tokens of the items that one rank has not begun yet.

    Either the caller or the rank reads a token from the pipe, never both. If a TokenPipe is an argument of a call, the rank
    gets only the reading end of the pipe.
    """

    def __init__(self) -> None:
        """Open the pipe. Raises OSError if this process cannot open more descriptors."""
        self._reader, self._writer = Pipe(duplex=False)
        for end in (self._reader, self._writer):
            os.set_blocking(end.fileno(), False)

    def __getstate__(self) -> Connection:
        return self._reader

    def __setstate__(self, reader: Connection) -> None:
        self._reader = self._writer = reader

    def write(self, first: int, count: int) -> None:
        """Write tokens. The pipe must never contain more than MAX_TOKENS tokens. Raises OSError."""
        os.write(self._writer.fileno(), b"".join(map(TOKEN.pack, range(first, first + count))))

    def take(self) -> int | None:
        """Return the next token, or None if the pipe is empty. Raises OSError."""
        try:
            data = os.read(self._reader.fileno(), TOKEN.size)
        except BlockingIOError:
            return None
        return int(TOKEN.unpack(data)[0]) if data else None

    def close(self) -> None:
        """Close this process's ends of the pipe.

        If the caller closes its ends of the pipe, the rank can still read the tokens that are in the pipe.
        """
        self._reader.close()
        self._writer.close()


def open_item_channel() -> tuple[socket.socket, socket.socket]:
    """Create two connected sockets: the caller's socket, which never blocks, and the rank's socket. Raises OSError."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.setblocking(False)
    return own, other


def send_message(channel: socket.socket, kind: ItemKind, body: bytes = b"", fds: Sequence[int] = ()) -> bool:
    """Send a message. Return False if the receiver has closed its socket. Raises OSError."""
    try:
        socket.send_fds(channel, [bytes([kind]), body], list(fds), MSG_NOSIGNAL)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def receive_message(channel: socket.socket) -> ItemMessage | None:
    """Return the kind, the body and the descriptors of the next message. Raises OSError.

    Return None if the sender has closed its socket and no message is left. The caller of this function must close the
    descriptors. If this process has reached its limit of open files, the result contains None instead of the list of
    descriptors.
    """
    while True:
        try:
            data, fds, is_cut = receive_with_fds(channel, READ_SIZE, MAX_DESCRIPTORS)
            break
        except ConnectionResetError:  # raised once if a rank died before it had received everything. Its messages follow
            continue
    while is_cut and fds:
        os.close(fds.pop())
    return (ItemKind(data[0]), data[1:], None if is_cut else fds) if data else None
