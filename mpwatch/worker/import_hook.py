"""Lets the rank change another module, such as pdb, as soon as that module has been imported. This module runs in a rank.

This module is small, because every rank imports it. Most ranks never need pdb or torch, so mpwatch does not import pdb or
torch when a rank starts.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class ModuleFinder:
    """Passes the module `name` to `change`, once, as soon as Python has imported it."""

    def __init__(self, name: str, change: Callable[[ModuleType], object]) -> None:
        self._name = name
        self.change = change

    def install(self) -> None:
        """If the module is already loaded, change it now. If the module is not loaded yet, change it after its import."""
        if self._name in sys.modules:
            self.change(sys.modules[self._name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the module that this finder changes, or None for any other module."""
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangingLoader(spec.loader, self)  # type: ignore[assignment]  # typeshed wants optional methods, too
        return spec


class _ChangingLoader:
    """Loads a module with the module's own loader, and then changes the module."""

    def __init__(self, loader: Loader, finder: ModuleFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self._finder)
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.change(module)
