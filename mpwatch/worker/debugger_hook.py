"""Connects pdb with the watcher as soon as a rank imports pdb. Every rank imports this module, and few need debugger.py."""

from __future__ import annotations

import os
import sys

from mpwatch.worker.import_hook import ModuleFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from mpwatch.worker.channel import Channel

_is_post_mortem = False  # whether a prompt opens if the rank's function raises


def install(channel: Channel, *, post_mortem: bool) -> None:
    global _is_post_mortem
    _is_post_mortem = post_mortem
    pid = os.getpid()

    def route(module: ModuleType) -> None:
        from mpwatch.worker import debugger

        debugger.route_pdb(module, debugger.Prompt(channel, pid))

    ModuleFinder("pdb", route).install()


def finish_stepping() -> None:
    """When the user's function has ended, keep pdb from stepping through the code that the rank runs then."""
    debugger = sys.modules.get("mpwatch.worker.debugger")
    if debugger is not None:
        debugger.finish_stepping()


def open_post_mortem(error: Exception) -> bool:
    """If debug="post_mortem" is set, show a prompt where the exception was raised. Return whether it is set."""
    if _is_post_mortem:
        from mpwatch.worker import debugger

        debugger.open_post_mortem(error)
    return _is_post_mortem
