"""What a process gets of the modules of the program that has started it, beside the definitions (definitions.py).

- The attributes of `__main__`, such as `__file__`. Neither a rank nor a process that a rank spawns imports the script.
- The files of modules that only the program finds: a plugin, a test that pytest has imported, a folder that it has taken
  from sys.path again.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from functools import partial

from mpwatch.wire.pickling.definitions import Loaded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any

    Files = dict[str, tuple[str | None, list[str] | None]]  # by module: its file, and the folders if it is a package

# Run in a spawned process before it has the caller's sys.path.
LOAD = "import sys; sys.path[:] = path; from mpwatch.wire.pickling import main_module; main_module.load_definitions(data)"


def describe() -> dict[str, Any]:
    main: Any = sys.modules["__main__"]
    about = {"__package__": getattr(main, "__package__", None), "__doc__": getattr(main, "__doc__", None)}
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name is not None:
        about["spec"] = spec.name
    path = getattr(main, "__file__", None)
    if path is not None and os.path.exists(path):  # '<stdin>' is no file
        about["__file__"] = os.path.abspath(path)
    if files := _find_own_files():
        about["files"] = files
    return about


def set_up(about: dict[str, Any]) -> None:
    """In a rank or in a process that it has spawned: set up `__main__`, and find the same modules as the caller."""
    files = about.pop("files", None)
    if files:
        _finder.files.update(files)
        if _finder not in sys.meta_path:
            sys.meta_path.append(_finder)
    if (spec := about.pop("spec", None)) is not None:
        from importlib.machinery import ModuleSpec

        about["__spec__"] = ModuleSpec(spec, None)
    main = sys.modules["__main__"]
    vars(main).update(about)
    from multiprocessing import spawn

    if not isinstance(spawn.get_preparation_data, partial):
        spawn.get_preparation_data = partial(_prepare_child, spawn.get_preparation_data, main)


# --- Modules that only the caller finds

_own_files: tuple[Any, Files] = None, {}  # what they depend on, and the files


def _find_own_files() -> Files:
    global _own_files
    state = len(sys.modules), tuple(sys.path)
    if _own_files[0] != state:
        modules = list(sys.modules.items())
        folders = {os.path.abspath(entry) for entry in sys.path}
        files = dict(filter(None, (_find_own_file(name, module, folders) for name, module in modules)))
        for name in list(files):  # pytest makes parents without a file
            while (name := name.rpartition(".")[0]) and getattr(sys.modules.get(name), "__path__", None) is None:
                files.setdefault(name, (None, []))
        _own_files = state, files
    return _own_files[1]


def _find_own_file(name: str, module: Any, folders: set[str]) -> tuple[str, Any] | None:
    attributes = getattr(module, "__dict__", {})
    file, path = attributes.get("__file__"), attributes.get("__path__")
    if not isinstance(file, str) or attributes.get("__name__") != name or name in {"__main__", "__mp_main__"}:
        return None
    parent, _, last = name.rpartition(".")
    place = file if path is None else os.path.dirname(file)
    folder, base = os.path.split(place)
    found_in = folders if not parent else getattr(sys.modules.get(parent), "__path__", ())
    if folder in found_in and base.partition(".")[0] == last:
        return None
    return name, (os.path.abspath(file), None if path is None else list(path))


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
    from mpwatch.wire.pickling.reducers import get_table

    stream = io.BytesIO()
    defined = [value for value in vars(main).values() if getattr(value, "__module__", None) == "__main__"]
    try:
        stream.write(pickle.dumps(describe()))
        Pickler(stream, get_table(for_call=True), is_call=True).dump(defined)
    except Exception:  # noqa: BLE001  an object that arrived in another way. The process then imports the script
        return data
    data.pop("init_main_from_path", None)
    data.pop("init_main_from_name", None)
    return {**data, "mpwatch": Loaded(exec, LOAD, {"path": data["sys_path"], "data": stream.getvalue()})}


def load_definitions(data: bytes) -> None:
    """In a process that a rank has spawned: load what the rank has sent."""
    stream = io.BytesIO(data)
    set_up(pickle.load(stream))
    pickle.load(stream)
