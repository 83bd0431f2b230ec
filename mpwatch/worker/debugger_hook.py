"""Lets debugger.py change the module pdb when it is imported. Runs in a rank.

This module is small, since every rank imports it. Most ranks never need debugger.py.
"""

from __future__ import annotations

import os
import sys

from mpwatch.worker.import_hook import ModuleFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType, TracebackType

    from mpwatch.worker.channel import Channel

DEBUGGER = "mpwatch.worker.debugger"

_is_post_mortem = False  # whether a prompt opens if the rank's function raises


def install(channel: Channel, *, post_mortem: bool) -> None:
    """Route pdb to the watcher as soon as it is imported.

    Args:
        channel: to the watcher.
        post_mortem: whether a prompt opens if the rank's function raises.
    """
    global _is_post_mortem
    _is_post_mortem = post_mortem
    if post_mortem:
        from mpwatch.worker import debugger

        debugger.start_inspector(channel)
    pid = os.getpid()

    def route(module: ModuleType) -> None:
        from mpwatch.worker import debugger

        debugger.route_pdb(module, debugger.DebuggerClient(channel, pid))

    ModuleFinder("pdb", route).install()


def finish_stepping() -> None:
    """Stop only at the breakpoints that the user has set, now that the function has ended."""
    debugger = sys.modules.get(DEBUGGER)
    if debugger is not None:
        debugger.finish_stepping()


def drop_frames_of_debugger(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of pdb and mpwatch, if the debugger has raised the exception itself."""
    debugger = sys.modules.get(DEBUGGER)
    return trace if debugger is None else debugger.drop_own_frames(trace)


def open_post_mortem(error: Exception) -> bool:
    """With the option `post_mortem`, show a prompt where the exception was raised, and wait until the user leaves it.

    Return whether it was tried.
    """
    if _is_post_mortem:
        from mpwatch.worker import debugger

        debugger.open_post_mortem(error)
    return _is_post_mortem
