"""Connects pdb with the watcher as soon as a rank imports pdb.

pdb then gets the user's input from the watcher, and sends its output to the watcher.

Every rank imports this small module, but only a rank that uses the debugger imports the larger debugger.py.
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
    """Connect pdb with the watcher as soon as pdb is imported.

    Args:
        channel: the channel to the watcher.
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
    """Make pdb stop only at breakpoints from now on, even if the user has entered `step` or `next`.

    mpwatch calls `finish_stepping` when the user's function has ended, so that pdb does not step through the code that the
    rank runs after the function.
    """
    debugger = sys.modules.get(DEBUGGER)
    if debugger is not None:
        debugger.finish_stepping()


def drop_frames_of_debugger(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback. If debugger.py has raised the exception, leave out the frames of the debugger."""
    debugger = sys.modules.get(DEBUGGER)
    return trace if debugger is None else debugger.drop_own_frames(trace)


def open_post_mortem(error: Exception) -> bool:
    """If debug="post_mortem" is set, show a prompt of pdb where the exception was raised.

    Return whether `post_mortem` is set.
    """
    if _is_post_mortem:
        from mpwatch.worker import debugger

        debugger.open_post_mortem(error)
    return _is_post_mortem
