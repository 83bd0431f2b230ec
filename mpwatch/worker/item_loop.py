"""Calls the function of `mpwatch.map` in a rank.

caller: call of `load` ---> call of `run_items` ---> call of `run_items` ---> ...
rank:   RETURNED            ITEM, ITEM, RETURNED     ITEM, ITEM, RETURNED
"""

from __future__ import annotations

import os

from mpwatch.os_support.clock import monotonic
from mpwatch.worker import context
from mpwatch.worker.main import call_user, send_item

CHUNK_SECONDS = 0.02  # after which a call begins no more items: a call costs about 0.5 ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_fn: Callable[[Any], object]


def load(*, fn: Callable[[Any], object]) -> None:
    global _fn
    _fn = fn


def run_items(*items: Any) -> None:
    """Call the function with each item, and send each value before the next item begins. What it raises ends this call.

    There are fewer values than items if they have taken CHUNK_SECONDS.
    """
    pid = os.getpid()
    stop_at = monotonic() + CHUNK_SECONDS
    for item in items:
        context.heartbeat()
        context.begin_call()  # each item has its own steps
        value = call_user(_fn, item)
        if os.getpid() != pid:  # the function has forked: this is a copy
            return
        send_item(value)
        if monotonic() > stop_at:
            return
