"""Waits for the import of pdb, and lets debugger.py change it. Runs in a rank.

This module is small, since every rank imports it. Most ranks never need debugger.py.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

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
    finder = PdbFinder(channel, os.getpid())
    if "pdb" in sys.modules:
        finder.route(sys.modules["pdb"])
    else:
        sys.meta_path.insert(0, finder)


def finish_stepping() -> None:
    """Stop only at the breakpoints that the user has set, now that the function has ended."""
    debugger = sys.modules.get(DEBUGGER)
    if debugger is not None:
        debugger.finish_stepping()


def open_post_mortem(error: Exception) -> bool:
    """With the option `post_mortem`, show a prompt where the exception was raised, and wait until the user leaves it.

    Return whether it was tried.
    """
    if _is_post_mortem:
        from mpwatch.worker import debugger

        debugger.open_post_mortem(error)
    return _is_post_mortem


class PdbFinder:
    """Finds the module pdb, and lets debugger.py change it when it has been loaded.

    Args:
        channel: to the watcher.
        pid: of the rank.
    """

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel = channel
        self._pid = pid

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of pdb; None for any other module, which the other finders find."""
        if name != "pdb":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = PdbLoader(spec.loader, self)  # type: ignore[assignment]  # typeshed wants optional methods, too
        return spec

    def route(self, module: ModuleType) -> None:
        """Change the module pdb."""
        from mpwatch.worker import debugger

        debugger.route_pdb(module, debugger.DebuggerClient(self._channel, self._pid))


class PdbLoader:
    """Loads pdb as its own loader does, and then changes it."""

    def __init__(self, loader: Loader, finder: PdbFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module if its own loader creates it. None: Python creates it."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and change it."""
        with suppress(ValueError):
            sys.meta_path.remove(self._finder)
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.route(module)
