"""Lets the rank change another module, such as pdb, as soon as it is imported: most ranks never need pdb or torch.

Every rank imports this module, so it is small.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class ModuleFinder:
    """Passes the module `name` to `change`, once, as soon as Python has imported it."""

    def __init__(self, name: str, change: Callable[[ModuleType], object]) -> None:
        self._name = name
        self.change = change

    def install(self) -> None:
        if self._name in sys.modules:
            self.change(sys.modules[self._name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                del loader.exec_module
                execute(module)
                self.change(module)

            loader.exec_module = execute_and_change
        return spec
