"""cloudpickle's pickler, and what multiprocessing and torch know how to send: calls in the watcher, answers in a rank."""

import functools
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping
from enum import Enum
from pickle import PickleBuffer
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import cloudpickle

from mpwatch.wire.pickling.pickle_buffers import REDUCERS, NullBundle, PickleBundle
from mpwatch.wire.pickling.reducers import Reducers, multiprocessing_reducers, torch_reducers

Keeper = Callable[[PickleBuffer], bool]
CACHED = type(functools.lru_cache(len))  # what the decorator makes; it has no public name


class _ClassPickler(cloudpickle.Pickler):
    """cloudpickle's, with what it forgets of a class that goes by value: its qualified name, and that it has slots.

    Args:
        stream: where the pickle goes.
        keep: takes its large buffers, see bundle.py; None: there they go with the rest.
        first: reducers that come before cloudpickle's own.
        last: those that come after.
    """

    def __init__(self, stream: Any, keep: Keeper | None, first: Reducers, last: Reducers | None = None) -> None:
        # before __init__, which is when the C pickler looks for it
        own: Any = cloudpickle.Pickler.dispatch_table
        self.dispatch_table = ChainMap(first, REDUCERS, own, last or {})
        super().__init__(stream, protocol=5, buffer_callback=keep)

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and reduced is not NotImplemented:
            if (home := _true_home(obj)) is not None:
                return getattr, (home, obj.__qualname__)
            _, made_of, *state = reduced  # no state for NoneType and the like
            if state:
                attributes, _ = state[0]
                attributes["__qualname__"] = obj.__qualname__
                if vars(obj).get("__slots__") and not issubclass(obj, Enum):
                    _move_slots(attributes, made_of)
        return reduced


def _true_home(cls: type) -> ModuleType | None:
    """The module in which a class is found although it names another: pytest's Skipped says that it is a builtin."""
    for base in cls.__mro__[1:]:
        home = sys.modules.get(base.__module__)
        # not by getattr(): a module that loads what it is asked for is not to begin with that here
        if home is not None and base.__module__ != "__main__" and vars(home).get(cls.__qualname__) is cls:
            return home
    return None


def _move_slots(attributes: dict[str, Any], made_of: tuple[Any, ...]) -> None:
    """Slots must be there when the class is made; set later they are a mere attribute."""
    _, _, _, namespace, *_ = made_of
    namespace["__slots__"] = attributes.pop("__slots__")
    for name in [name for name, value in attributes.items() if isinstance(value, MemberDescriptorType)]:
        del attributes[name]


class CallPickler(_ClassPickler):
    """Pickles functions and classes of `__main__` by value, once, and remembers them in `from_main`; the code of all that
    goes by value in `codes`.

    Args:
        bundle: where the pickle goes.
        main: the caller's `__main__`.
    """

    def __init__(self, bundle: PickleBundle | NullBundle, main: ModuleType) -> None:
        super().__init__(bundle, bundle.keep, torch_reducers(), multiprocessing_reducers())
        self.main = vars(main)
        self.from_main: dict[str, object] = {}
        self.codes: list[CodeType] = []
        self.globals_ref[id(self.main)] = _MainGlobals()

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle for each object; notes what goes by value although it has a name in `__main__`."""
        if isinstance(obj, CACHED) and obj.__module__ == "__main__":
            return self._reduce_cached(obj)
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and reduced is not NotImplemented:
            self.codes.append(obj.__code__)
        top = None if reduced is NotImplemented else _home(obj, self.main)
        if top is not None:
            self.from_main[top] = self.main[top]
        return reduced

    def _reduce_cached(self, obj: Any) -> Any:
        """A function under lru_cache pickles itself as a name, which the rank does not have yet."""
        name = obj.__qualname__
        if self.main.get(name) is obj:
            self.from_main[name] = obj
        return _cached, (obj.__wrapped__, obj.cache_parameters())


def _cached(fn: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


class AnswerPickler(_ClassPickler):
    """In a rank: pickles by name the functions and classes that came from the caller's `__main__`.

    Args:
        stream: where the pickle goes.
        keep: see `_ClassPickler`.
        first: see `_ClassPickler`.
        from_caller: these functions and classes, by name.
    """

    def __init__(self, stream: Any, keep: Keeper | None, first: Reducers, from_caller: Mapping[str, object]) -> None:
        super().__init__(stream, keep, first)
        self.from_caller = from_caller

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle for each object."""
        main = vars(sys.modules["__main__"])
        home = _home(obj, main)
        if home is not None and main[home] is self.from_caller.get(home):
            return NotImplemented  # plain pickle's way: by name
        return super().reducer_override(obj)


def _home(obj: Any, main: dict[str, Any]) -> str | None:
    """The name of the top level of `__main__` under which plain pickle finds this function or class, if it does."""
    if not isinstance(obj, type | FunctionType) or obj.__module__ != "__main__":
        return None
    top, *rest = obj.__qualname__.split(".")
    found = main.get(top)
    for name in rest:
        found = vars(found).get(name) if isinstance(found, type) else None
    return top if found is obj else None


class _MainGlobals(dict[str, Any]):
    """Where cloudpickle would make new globals for functions of `__main__`, the rank's own are taken."""

    def __reduce__(self) -> Any:
        return vars, (sys.modules["__main__"],)
