"""The messages of `mpwatch.map` between the caller and a rank.

    caller                                   rank
      | <-------------- READY ---------------- |   the rank has loaded the function
      | ----------- ITEM | ITEMS ------------> |   one item, or several, when all earlier ones have a value
      | <-------------- BEGUN ---------------- |   the rank has unpickled them
      | <-------------- VALUE ---------------- |   one for each item, before the next item begins
      | <-------------- REST ----------------- |   the rank does not do the others, or cannot unpickle them
      | ----------- end of the stream -------> |   there are no more items

Each rank has a socket of its own for them, so they do not pass through the watcher thread. If a rank dies, the caller can
still read its last messages, which show at which item it died. The socket has the type SOCK_SEQPACKET, which keeps the
boundaries of messages. Large pickles are sent in a file, whose descriptor comes with the message (pickling/packed.py).
"""

from __future__ import annotations

import enum
import os
import socket

from mpwatch.os_support.descriptors import MSG_NOSIGNAL, receive_with_fds
from mpwatch.wire.messages import MAX_DESCRIPTORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    ItemMessage = tuple["ItemKind", bytes, list[int] | None]

CHUNK_SECONDS = 0.02  # after which a rank gives back the items that it has not begun: sending some costs about 0.2 ms
READ_SIZE = 1 << 17  # bytes; a packed value in the message itself has at most half of that


class ItemKind(enum.IntEnum):
    """The kind of a message, and its body."""

    READY = 1  # empty
    ITEM = 2  # the packed call whose argument is the item; empty if the first descriptor is its file
    ITEMS = 3  # the same with several arguments
    BEGUN = 4  # empty
    VALUE = 5  # a packed value; empty if the descriptor is its file
    REST = 6  # empty


def open_item_channel() -> tuple[socket.socket, socket.socket]:
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
    """Return the next message, or None if the sender has closed its socket and no message is left. Raises OSError.

    The caller closes the descriptors. There is None in place of them if this process has too many files open.
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
