"""`Script`: a script or a module that each rank runs as its `__main__`.

The script gets a new `__main__` module, as a process that multiprocessing spawns does. The rank's own `__main__` comes back
when the script ends. So an exception of a class of the script is sent by value, and the rank's next call finds what the
caller's `__main__` has sent.

A rank imports this module, so this module imports no large modules.
"""

from __future__ import annotations

import builtins
import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any, overload

_running = ""  # the repr of the Script that this process runs


class Script:
    """A finished script for `run`, `submit`, `main` and `WorkerGroup.run`, such as a script that was written for torchrun.

    `mpwatch.run(Script("train.py", "--lr", "0.1"), nprocs=4)` does in each rank what `python train.py --lr 0.1` does: the
    script is `__main__`, `sys.argv` has the arguments, and the folder of the script comes first in `sys.path`. RANK,
    WORLD_SIZE, MASTER_ADDR and so on are in the environment. If the script calls `init_process_group()` itself, leave the
    option `backend` out.

    A rank succeeds when the script reaches its end or calls `sys.exit(0)`. The rank's value in the RunResult is None. After
    its end, the script is no longer `__main__`, but threads and `atexit` functions can still use its functions and
    variables. A rank of a WorkerGroup keeps the modules that the script has imported.

    Args:
        args: the path of the script, and then the script's arguments, as in `sys.argv`. A relative path starts at the
            folder that is current when the Script is made. With `module`, only the arguments.
        module: name of the module to run, as with `python -m`: a module such as "pkg.train", or a package that has a
            `__main__.py`. The folder that is current when the Script is made comes first in `sys.path`.

    Raises:
        FileNotFoundError: the path is not that of a file.
        TypeError, ValueError: an argument is not valid. Arguments are strings or paths, because `sys.argv` has no numbers.
        RuntimeError: this process is just running the same script with the same arguments. The new ranks would start it
            again, without end.
    """

    if TYPE_CHECKING:

        @overload
        def __init__(self, path: str | os.PathLike[str], /, *args: str | os.PathLike[str]) -> None: ...
        @overload
        def __init__(self, *args: str | os.PathLike[str], module: str) -> None: ...

    def __init__(self, *args: str | os.PathLike[str], module: str | None = None) -> None:
        texts = [_to_text(argument) for argument in args]
        if module is None:
            if not texts:
                raise TypeError('Script needs the path of a script, or module="..."')
            self._path = os.path.abspath(texts.pop(0))
            if not os.path.isfile(self._path):
                raise FileNotFoundError(f"there is no script {self._path}")
            self._folder = os.path.dirname(os.path.realpath(self._path))  # Python follows links, too
            self.__name__ = os.path.basename(self._path)
        else:
            if not isinstance(module, str):
                raise TypeError(f"module must be the name of a module, such as 'pkg.train', not {module!r:.200}")
            if not module or "/" in module or module.endswith(".py"):
                raise ValueError(
                    f"module must be the name of a module, such as 'pkg.train', not {module!r}; to run a file, pass its "
                    "path: Script('pkg/train.py')"
                )
            self._path = ""
            self._folder = os.getcwd()
            self.__name__ = module
        self.__qualname__ = self.__name__  # for messages and `ps`
        self._args = texts
        if repr(self) == _running:
            raise RuntimeError(
                f"{self!r} would start itself in each of its ranks, without end; make the Script in another program, or "
                'only `if "RANK" not in os.environ:`'
            )

    def __call__(self) -> None:
        """Run the script in this process. At the end, `__main__`, `sys.argv` and `sys.path` become what they were."""
        global _running
        before = sys.argv[:], sys.path[:], _running
        caller = sys.modules["__main__"]
        modules = {"__main__": caller, "__mp_main__": sys.modules.get("__mp_main__", caller)}
        main = ModuleType("__main__")
        sys.path.insert(0, self._folder)
        try:
            code, attributes = _load_file(self._path) if self._path else _load_module(self.__name__)
            vars(main).update(attributes, __builtins__=builtins)
            sys.modules.update(dict.fromkeys(modules, main))  # spawned processes send objects of `__mp_main__`
            sys.argv[:] = [attributes["__file__"], *self._args]
            _running = repr(self)
            exec(code, vars(main))  # noqa: S102  the script
        finally:
            sys.modules.update(modules)
            sys.argv[:], sys.path[:], _running = before

    def __repr__(self) -> str:
        if self._path:
            return f"Script({', '.join(map(repr, [self._path, *self._args]))})"
        return f"Script({', '.join([*map(repr, self._args), f'module={self.__name__!r}'])})"


def _to_text(argument: object) -> str:
    text = os.fspath(argument) if isinstance(argument, os.PathLike) else argument
    if not isinstance(text, str):
        raise TypeError(f"the arguments of a Script must be strings or paths, as in sys.argv, not {argument!r:.200}")
    return text


def _load_file(path: str) -> tuple[CodeType, dict[str, Any]]:
    loader = SourceFileLoader("__main__", path)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)  # source_to_code would add frames of importlib
    return code, {"__file__": path, "__loader__": loader, "__package__": None, "__spec__": None}


def _load_module(name: str) -> tuple[CodeType, dict[str, Any]]:
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    loader: Any = None if spec is None else spec.loader
    code = None if spec is None or loader is None else loader.get_code(spec.name)
    if spec is None or code is None:
        raise ModuleNotFoundError(f"there is no module {name} that can be run, as by `python -m {name}`", name=name)
    return code, {"__file__": spec.origin, "__loader__": loader, "__package__": spec.parent, "__spec__": spec}
