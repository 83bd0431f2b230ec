"""Calls the function of `mpwatch.map` in a rank, and sends each value to the caller immediately.

`mpwatch.map` makes the ranks of a WorkerGroup call `serve_items`. If the user's function raises an exception for an item,
the call of `serve_items` fails. If `mpwatch.map` continues after a failed call of `serve_items`, the rank calls
`serve_items` again.
"""

from __future__ import annotations

import errno
import os
import select
import time
from contextlib import closing

from mpwatch.wire.item_channel import ItemKind, TokenPipe, receive_message, send_message
from mpwatch.wire.pickling import call_payload
from mpwatch.worker import context
from mpwatch.worker.main import pickle_value

RETRY_SECONDS = 0.01

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any


def serve_items(channel: socket.socket, tokens: TokenPipe, *, fn: Callable[[Any], object]) -> None:
    """Call `fn` with each item that the caller sends, until there are no more items.

    Args:
        channel: this rank's end of an item channel.
        tokens: the pipe with the tokens of the items.
        fn: the function of `mpwatch.map`.
    """
    pid = os.getpid()
    token: int | None = None  # the token that was taken last
    with channel, closing(tokens):
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        send_message(channel, ItemKind.READY)
        # Not in recvmsg(2): a process that sleeps there also wakes up when the caller has read what the rank sent.
        while poll.poll() and (items := _receive_items(channel)) is not None:
            for number, item in items:
                while token is None or token < number:
                    token = tokens.take()
                    if token is None:
                        break
                if token != number:  # the caller has taken the token of this item
                    continue
                context.heartbeat()
                context.begin_call()  # each item has its own steps
                value = _call(fn, item)
                # The pid differs if fn has forked and this is the copy. The send fails if the caller reads no more values.
                if os.getpid() != pid or not _send_value(channel, value):
                    return


def _receive_items(channel: socket.socket) -> list[tuple[int, Any]] | None:
    """Return the next items with their tokens, or None if there are no more items. A token is the number of an item.

    If a message with several items cannot be unpickled, send DIVIDE, and return an empty list. After DIVIDE, the caller
    sends the items one by one. If a message with one item cannot be unpickled, raise the exception.
    """
    message = receive_message(channel)
    if message is None:
        return None
    kind, body, fds = message
    try:
        first, *items = call_payload.unpack(body, fds, lambda _: 0).args
        return list(enumerate(items, first))
    except Exception:
        if kind is ItemKind.ITEM:
            raise
        send_message(channel, ItemKind.DIVIDE)
        return []


def _call(fn: Callable[[Any], object], item: object) -> object:
    try:
        return fn(item)
    except SystemExit as error:
        if error.code is None or (isinstance(error.code, int) and error.code == 0):  # a success, as for `mpwatch.run`
            return None
        raise


def _send_value(channel: socket.socket, value: object) -> bool:
    """Send a value to the caller, and return whether the value could be sent. Raises what `pickle_value` raises.

    The rank stops its heartbeats before it sends a value, because the rank may wait long for the next item.
    """
    with closing(pickle_value(value)) as packed:
        context.stop_heartbeats()
        while True:
            try:
                return send_message(
                    channel, ItemKind.VALUE, packed.body, [] if packed.file is None else [packed.file.fileno()]
                )
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
            # Too many files are on their way to processes of this user (`ulimit -n`). The caller receives some of them soon.
            time.sleep(RETRY_SECONDS)
