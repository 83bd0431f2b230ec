"""What a process gets of the modules of the program that has started it, beside the definitions (definitions.py).

- The attributes of `__main__`, such as `__file__`. Neither a rank nor a process that a rank spawns imports the script.
- The files of modules that only the program finds: a plugin, a test that pytest has imported, a folder that it has taken
  from sys.path again.
"""

from __future__ import annotations

import io
import os
import sys
from functools import partial

from mpwatch.wire.pickling.definitions import MAIN_NAMES, Loaded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from importlib.machinery import ModuleSpec
    from typing import Any

    Files = dict[str, tuple[str | None, list[str] | None]]  # by module: its file, and the folders if it is a package

# Run in a spawned process before it has the caller's sys.path.
LOAD = """
import pickle, sys
sys.path[:] = path
from mpwatch.wire.pickling import main_module
main_module.set_up(about)
pickle.loads(data)
"""


def describe(modules: Iterable[str]) -> dict[str, Any]:
    main: Any = sys.modules["__main__"]
    about = {"__package__": getattr(main, "__package__", None), "__doc__": getattr(main, "__doc__", None)}
    path = getattr(main, "__file__", None)
    if path is not None and os.path.exists(path):  # '<stdin>' is no file
        about["__file__"] = os.path.abspath(path)
    if files := _find_own_files(modules):
        about["files"] = files
    return about


def set_up(about: dict[str, Any]) -> None:
    """In a rank or in a process that it has spawned: set up `__main__`, and find the same modules as the caller."""
    files = about.pop("files", None)
    if files:
        _finder.files.update(files)
        if _finder not in sys.meta_path:
            sys.meta_path.append(_finder)
    main = sys.modules["__main__"]
    vars(main).update(about)
    from multiprocessing import spawn

    if not isinstance(spawn.get_preparation_data, partial):
        spawn.get_preparation_data = partial(_prepare_child, spawn.get_preparation_data, main)


# --- Modules that only the caller finds


def _find_own_files(names: Iterable[str]) -> Files:
    """Return the files of those of these modules that no other process finds, and of all modules beside them."""
    files: Files = {}
    for name in names:
        if (module := sys.modules.get(name)) is not None:
            _find_own_file(name, module, files)
    if files:
        folders = {os.path.dirname(file) for file, _ in files.values() if file is not None}
        for name, module in list(sys.modules.items()):
            if os.path.dirname(getattr(module, "__dict__", {}).get("__file__") or "") in folders:
                _find_own_file(name, module, files)
    return files


def _find_own_file(name: str, module: Any, files: Files) -> None:
    attributes = getattr(module, "__dict__", {})
    file, path = attributes.get("__file__"), attributes.get("__path__")
    if not isinstance(file, str) or name in MAIN_NAMES:
        return
    parent, _, last = name.rpartition(".")
    folder, base = os.path.split(file if path is None else os.path.dirname(file))
    folders = getattr(sys.modules.get(parent), "__path__", ()) if parent else sys.path
    is_found = folder in folders or (not parent and folder in map(os.path.abspath, sys.path))
    if not is_found or base.partition(".")[0] != last:
        files[name] = os.path.abspath(file), None if path is None else list(path)
        while parent and not hasattr(sys.modules.get(parent), "__file__"):  # pytest makes such parents
            files.setdefault(parent, (None, []))
            parent = parent.rpartition(".")[0]


class _Finder:
    """Finds a module that nothing else finds."""

    def __init__(self) -> None:
        self.files: Files = {}

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name not in self.files:
            return None
        from importlib.util import spec_from_file_location, spec_from_loader

        file, folders = self.files[name]
        if file is None:
            return spec_from_loader(name, None, is_package=True)
        return spec_from_file_location(name, file, submodule_search_locations=folders)


_finder: Any = _Finder()  # in a rank


# --- Processes that a rank spawns


def _prepare_child(prepare: Callable[[str], dict[str, Any]], main: Any, name: str) -> dict[str, Any]:
    """Send a spawned process the definitions in `__main__`. Without that it would import the script, which starts ranks."""
    data = prepare(name)
    if sys.modules["__main__"] is not main:  # a Script, which is imported as it is without mpwatch
        return data
    from mpwatch.wire.pickling.pickler import Pickler

    stream = io.BytesIO()
    defined = [value for value in vars(main).values() if getattr(value, "__module__", None) in MAIN_NAMES]
    try:
        pickler = Pickler(stream, is_call=True)
        pickler.dump(defined)
    except Exception:  # noqa: BLE001  an object that arrived in another way. The process then imports the script
        return data
    data.pop("init_main_from_path", None)
    data.pop("init_main_from_name", None)
    return {
        **data,
        "mpwatch": Loaded(
            exec, LOAD, {"path": data["sys_path"], "about": describe(pickler.modules), "data": stream.getvalue()}
        ),
    }
