"""Picklers based on cloudpickle: `CallPickler` for calls in the watcher, `AnswerPickler` for return values in a rank."""

import functools
import io
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping
from enum import Enum
from importlib import import_module
from pickle import PickleBuffer
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import cloudpickle

from mpwatch.wire.pickling.per_rank import PerRank, refuse_per_rank
from mpwatch.wire.pickling.pickle_buffers import VIEW_REDUCERS, NullBundle, PickleBundle
from mpwatch.wire.pickling.reducers import Reducers, multiprocessing_reducers, torch_reducers

BufferCallback = Callable[[PickleBuffer], bool | None]
LRU_CACHE_TYPE = type(functools.lru_cache(len))  # the class of a decorated function, which has no public name


class _ClassPickler(cloudpickle.Pickler):
    """A cloudpickle pickler that also keeps the qualified name and the slots of each class that it pickles by value.

    Args:
        stream: the file that receives the pickle.
        keep: the function that takes large buffers (pickle_buffers.py). If it is None, the pickle contains them.
        first: reducers that have priority over cloudpickle's reducers.
        last: reducers that are used if cloudpickle has none.
    """

    def __init__(self, stream: Any, keep: BufferCallback | None, first: Reducers, last: Reducers | None = None) -> None:
        # set before __init__, in which the C pickler reads it
        own: Any = cloudpickle.Pickler.dispatch_table
        self.dispatch_table = ChainMap(first, VIEW_REDUCERS, {CodeType: _reduce_code}, own, last or {})
        super().__init__(stream, protocol=5, buffer_callback=keep)

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            return _reduce_stand_in(obj)
        if isinstance(obj, type):
            if (module := _find_defining_module(obj)) is not None:
                return getattr, (module, obj.__qualname__)
            _, make_args, *state = reduced  # NoneType, for example, has no state
            if state:
                attributes, _ = state[0]
                attributes["__qualname__"] = obj.__qualname__
                if vars(obj).get("__slots__") and not issubclass(obj, Enum):
                    _move_slots(attributes, make_args)
        elif obj.__module__ == "__main__" and (name := obj.__globals__.get("__name__", "")).partition(".")[0] == "torch":
            module = sys.modules.get(name)
            if getattr(module, "__dict__", None) is obj.__globals__:
                # torch.compile has wrapped a function of __main__, and its module has globals that cannot be sent
                make, (code, _, *others), (attributes, slots), *set_state = reduced
                slots["__globals__"] = {}
                return make, (code, _ModuleGlobals(module), *others), (attributes, slots), *set_state
        return reduced


def pack_by_value(value: object, keep: BufferCallback | None = None) -> bytes:
    """Pickle a value for another program that uses mpwatch. Functions and classes of `__main__` are pickled by value.

    If program A sends a class to program B, and B sends the class back, A gets its original class object, not a copy.

    Args:
        value: the value to pickle.
        keep: the function that takes the buffers of large arrays. If it is None, the pickle contains them.
    """
    stream = io.BytesIO()
    _ClassPickler(stream, keep, {}).dump(value)
    return stream.getvalue()


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Pickle a code object with its file name, because tracebacks and debuggers need the file name.

    cloudpickle 3.1.3 replaces the file name of a code object by "<dynamic-code>".
    """
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if isinstance(arg, str) and arg == "<dynamic-code>" else arg for arg in args)


def _reduce_stand_in(obj: Any) -> Any:
    """Pickle an object that stands in for a module by its name, such as `torch.backends.cudnn` or `torch.ops.aten`."""
    cls = type(obj)
    name = cls.__module__  # a module can replace itself by an instance of one of its classes
    if issubclass(cls, ModuleType) and cls is not ModuleType:
        name = obj.__name__
    elif sys.modules.get(name) is not obj:
        return NotImplemented
    if cls.__module__ == "__main__" or _is_sent_by_value(name):
        return NotImplemented
    if sys.modules.get(name) is obj:
        return import_module, (name,)
    parent, _, attribute = name.rpartition(".")
    module = sys.modules.get(parent)
    return (getattr, (module, attribute)) if getattr(module, "__dict__", {}).get(attribute) is obj else NotImplemented


def _is_sent_by_value(name: str) -> bool:
    return any(f"{name}.".startswith(f"{other}.") for other in cloudpickle.list_registry_pickle_by_value())


def _find_defining_module(cls: type) -> ModuleType | None:
    """Return the module that defines this class, or None if the search finds no such module.

    If the `__module__` of a class is wrong, pickle cannot find the class. For example, the `__module__` of pytest's Skipped
    is "builtins".
    """
    for base in cls.__mro__[1:]:
        module = sys.modules.get(base.__module__)
        # with vars(), since getattr() could make a module load something
        if module is not None and base.__module__ != "__main__" and vars(module).get(cls.__qualname__) is cls:
            return module
    return None


def _move_slots(attributes: dict[str, Any], make_args: tuple[Any, ...]) -> None:
    """Move `__slots__` to the arguments with which the unpickler creates the class.

    Setting `__slots__` has no effect when the class already exists.
    """
    _, _, _, namespace, *_ = make_args
    namespace["__slots__"] = attributes.pop("__slots__")
    for name in [name for name, value in attributes.items() if isinstance(value, MemberDescriptorType)]:
        del attributes[name]


class CallPickler(_ClassPickler):
    """Pickles functions and classes of `__main__` by value.

    `main_definitions` contains the pickled functions and classes that have a name in `__main__`. For a nested class
    `Outer.Inner`, `main_definitions` contains `Outer`. `codes` contains the code objects of all functions that were pickled
    by value.

    Args:
        bundle: the bundle that receives the pickle.
        main: the caller's `__main__`.
    """

    def __init__(self, bundle: PickleBundle | NullBundle, main: ModuleType) -> None:
        super().__init__(
            bundle, bundle.keep_buffer, {PerRank: refuse_per_rank, **torch_reducers()}, multiprocessing_reducers()
        )
        self.main = vars(main)
        self.main_definitions: dict[str, object] = {}
        self.codes: list[CodeType] = []
        self.globals_ref[id(self.main)] = _ModuleGlobals(main)

    def reducer_override(self, obj: Any) -> Any:
        """Record functions and classes that are pickled by value."""
        if isinstance(obj, LRU_CACHE_TYPE) and obj.__module__ == "__main__":
            return self._reduce_cached(obj)
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and reduced is not NotImplemented:
            self.codes.append(obj.__code__)
        top = None if reduced is NotImplemented else _find_in_main(obj, self.main)
        if top is not None:
            self.main_definitions[top] = self.main[top]
        return reduced

    def _reduce_cached(self, obj: Any) -> Any:
        """If a function of `__main__` has the decorator lru_cache, pickle the function by value.

        Without `_reduce_cached`, cloudpickle pickles only the name of a function that has the decorator lru_cache. A rank
        cannot find this function by its name, because the rank adds the caller's functions to its `__main__` only after it
        has unpickled the function and the arguments of the call.
        """
        name = obj.__qualname__
        if self.main.get(name) is obj:
            self.main_definitions[name] = obj
        return _rebuild_cached, (obj.__wrapped__, obj.cache_parameters())


def _rebuild_cached(fn: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


class AnswerPickler(_ClassPickler):
    """Pickles in a rank. If a function or class came from the caller's `__main__`, the pickle contains only its name.

    Args:
        stream: the file that receives the pickle.
        keep: see `_ClassPickler`.
        first: see `_ClassPickler`.
        caller_definitions: the functions and classes that came from the caller's `__main__`, by name.
    """

    def __init__(
        self, stream: Any, keep: BufferCallback | None, first: Reducers, caller_definitions: Mapping[str, object]
    ) -> None:
        super().__init__(stream, keep, first)
        self.caller_definitions = caller_definitions

    def reducer_override(self, obj: Any) -> Any:
        """Choose whether an object is pickled by name or by value."""
        main = vars(sys.modules["__main__"])
        name = _find_in_main(obj, main)
        if name is not None and main[name] is self.caller_definitions.get(name):
            return NotImplemented  # pickle then pickles the object by name
        return super().reducer_override(obj)


def _find_in_main(obj: Any, main: dict[str, Any]) -> str | None:
    """Return the first part of the name of a function or class in `__main__`, for example `Outer` for `Outer.Inner`.

    Return None if pickle cannot find the function or class in `__main__`.
    """
    if not isinstance(obj, type | FunctionType) or obj.__module__ != "__main__":
        return None
    top, *rest = obj.__qualname__.split(".")
    found = main.get(top)
    for name in rest:
        found = vars(found).get(name) if isinstance(found, type) else None
    return top if found is obj else None


class _ModuleGlobals(dict[str, Any]):
    """Stands for the global variables of a module of the rank. cloudpickle would make a new dict of copies instead."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __reduce__(self) -> Any:
        return vars, (self.module,)
