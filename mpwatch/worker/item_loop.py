"""Calls the function of `mpwatch.map` in a rank, and sends each value at once. See wire/item_channel.py."""

from __future__ import annotations

import errno
import os
import select
import time
from contextlib import closing

from mpwatch.os_support.clock import monotonic
from mpwatch.wire.item_channel import CHUNK_SECONDS, ItemKind, receive_message, send_message
from mpwatch.wire.pickling import call_payload
from mpwatch.worker import context
from mpwatch.worker.main import pickle_value

RETRY_SECONDS = 0.01

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from typing import Any


def serve_items(channel: socket.socket, *, fn: Callable[[Any], object]) -> None:
    """Call `fn` with each item that the caller sends, until there are no more items. What `fn` raises ends this call."""
    pid = os.getpid()
    with channel:
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        context.heartbeat()  # or a rank that waits long for its first item would seem to send none
        context.stop_heartbeats()
        send_message(channel, ItemKind.READY)
        # Not in recvmsg(2): a process that sleeps there also wakes up when the caller has read what the rank sent.
        while poll.poll() and (items := _receive_items(channel)) is not None:
            give_back_at = monotonic() + CHUNK_SECONDS
            for number, item in enumerate(items):
                if number and monotonic() > give_back_at:
                    send_message(channel, ItemKind.REST)
                    break
                context.heartbeat()
                context.begin_call()  # each item has its own steps
                value = _call(fn, item)
                # The pid differs if fn has forked and this is the copy. The send fails if the caller reads no more values.
                if os.getpid() != pid or not _send_value(channel, value):
                    return


def _receive_items(channel: socket.socket) -> Sequence[Any] | None:
    """Return the next items, or None if there are no more. Several that cannot be unpickled are given back."""
    message = receive_message(channel)
    if message is None:
        return None
    kind, body, fds = message
    try:
        items = call_payload.unpack(body, fds, lambda _: 0).args
    except Exception:
        if kind is ItemKind.ITEM:
            raise
        send_message(channel, ItemKind.REST)
        return ()
    send_message(channel, ItemKind.BEGUN)
    return items


def _call(fn: Callable[[Any], object], item: object) -> object:
    try:
        return fn(item)
    except SystemExit as error:
        if error.code is None or (isinstance(error.code, int) and error.code == 0):  # a success, as for `mpwatch.run`
            return None
        raise


def _send_value(channel: socket.socket, value: object) -> bool:
    """Return whether the value could be sent. Raises what `pickle_value` raises. Heartbeats stop before, because the rank
    may wait long for the next item.
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
