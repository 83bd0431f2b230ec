"""The pickler of everything that mpwatch sends: cloudpickle, with what it lacks.

Functions and classes of `__main__` are pickled by value. What a rank sends back of the caller's `__main__` is only named, so
that the caller gets its own functions and classes. cloudpickle loses qualified names, slots, file names of code, and objects
that stand in for a module; it puts a module's globals into functions of `__main__` that torch.compile has wrapped.
"""

import functools
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from pickle import PickleBuffer
from types import CodeType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as internals

from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.pickling.packed import VIEW_REDUCERS

Reducers = Mapping[type, Callable[[Any], Any]]
LRU_CACHE_TYPE = type(functools.lru_cache(len))  # the class of a decorated function, which has no public name
NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Pickler(cloudpickle.Pickler):
    """A pickler of a call in the caller, or of a value or an exception in any process.

    Args:
        stream: the file that receives the pickle.
        keep: the function that takes large buffers. If it is None, the pickle contains them.
        first: reducers that have priority over cloudpickle's reducers.
        last: reducers that are used if cloudpickle has none.
        main: for a call, the caller's `__main__`. `Extras` then finds what the call uses of it.
        by_name: the functions and classes of this process's `__main__` that came from the caller.
    """

    def __init__(
        self,
        stream: Any,
        keep: Callable[[PickleBuffer], bool | None] | None = None,
        *,
        first: Reducers = NOTHING,
        last: Reducers = NOTHING,
        main: ModuleType | None = None,
        by_name: Mapping[str, object] = NOTHING,
    ) -> None:
        own, registered = cloudpickle.Pickler.dispatch_table.maps
        # set before __init__, in which the C pickler reads it
        self.dispatch_table = {**last, **registered, **own, CodeType: _reduce_code, **VIEW_REDUCERS, **first}
        super().__init__(stream, protocol=5, buffer_callback=keep)
        self.is_call = main is not None
        self.main = vars(sys.modules["__main__"] if main is None else main)
        self.by_name = by_name
        self.main_definitions: dict[str, object] = {}  # what was pickled by value and has a name in `__main__`
        self.codes: list[CodeType] = []  # of all functions that were pickled by value
        if main is not None:
            self.globals_ref[id(self.main)] = _ModuleGlobals(main)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type | FunctionType):
            if isinstance(obj, LRU_CACHE_TYPE) and self.is_call and obj.__module__ == "__main__":
                return self._reduce_cached(obj)
            return _reduce_stand_in(obj)
        name = _find_in_main(obj, self.main)
        if name is not None and self.main[name] is self.by_name.get(name):
            return NotImplemented  # pickle then pickles the object by name
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            return NotImplemented
        if name is not None:
            self.main_definitions[name] = self.main[name]
        if isinstance(obj, type):
            return self._reduce_class(obj, reduced)
        self.codes.append(obj.__code__)
        return _reduce_function(obj, reduced)

    def _reduce_class(self, cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        module = _find_defining_module(cls)
        if module is not None:
            return getattr, (module, cls.__qualname__)
        make, args, *state = reduced
        if not state:  # NoneType, for example
            return reduced
        attributes, _ = state[0]
        attributes["__qualname__"] = cls.__qualname__
        if vars(cls).get("__slots__") and not issubclass(cls, Enum):
            # setting `__slots__` has no effect when the class already exists, so the maker of the class gets them
            args[3]["__slots__"] = attributes.pop("__slots__")
            for name in [name for name, value in attributes.items() if isinstance(value, MemberDescriptorType)]:
                del attributes[name]
        return reduced if self.is_call else (_make_class, (make, args), state[0], None, None, _set_up_if_new)

    def _reduce_cached(self, fn: Any) -> Any:
        """Pickle it by value, which cloudpickle does not: the rank has the name only when the call is loaded."""
        name = fn.__qualname__
        if self.main.get(name) is fn:
            self.main_definitions[name] = fn
        return _rebuild_cached, (fn.__wrapped__, fn.cache_parameters())


class Extras:
    """What goes along with a call: definitions of `__main__`, and source lines that are in no file.

    It must be pickled after the call, when the pickler knows what the call uses. It is loaded as a list of definitions by
    name, `(names, (names, ... ({}, sources)))`, because a rank may not have to import this module.

    It does not refer to the pickler, whose memo refers to it: CPython crashes when it collects a cycle that has a memoryview
    with a PickleBuffer.

    Args:
        definitions: `Pickler.main_definitions`
        codes: `Pickler.codes`
        sent: the names in `__main__` that the rank has already got.
    """

    def __init__(self, definitions: Mapping[str, object], codes: Sequence[CodeType], sent: frozenset[str]) -> None:
        self._definitions = definitions
        self._codes = codes
        self._sent = sent

    def __reduce__(self) -> Any:
        new = {name: value for name, value in self._definitions.items() if name not in self._sent}
        if new:  # pickling them can add more
            return tuple, ((new, Extras(self._definitions, self._codes, self._sent | new.keys())),)
        return tuple, (({}, source_lines.collect_for_code(self._codes) if self._codes else {}),)


def pack_by_value(value: object, keep: Callable[[PickleBuffer], bool | None] | None = None) -> bytes:
    """Pickle a value for another program that uses mpwatch. Functions and classes of `__main__` are pickled by value.

    If program A sends a class to program B, and B sends the class back, A gets its original class object, not a copy.

    Args:
        value: the value to pickle.
        keep: the function that takes the buffers of large arrays. If it is None, the pickle contains them.
    """
    stream = io.BytesIO()
    Pickler(stream, keep).dump(value)
    return stream.getvalue()


def _make_class(make: Any, args: tuple[Any, ...]) -> Any:
    """Note whether the class is new: cloudpickle would change the attributes of one that this process already has."""
    *_, tracker_id, _ = args
    is_new = tracker_id not in internals._DYNAMIC_CLASS_TRACKER_BY_ID
    cls = make(*args)
    if is_new:
        _new_classes.add(cls)
    return cls


def _set_up_if_new(cls: type, state: Any) -> type:
    if cls in _new_classes:
        _new_classes.remove(cls)
        internals._class_setstate(cls, state)
    return cls


_new_classes: set[type] = set()  # between `_make_class` and `_set_up_if_new`


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Keep the file name. cloudpickle 3.1.3 replaces it by "<dynamic-code>", but tracebacks and debuggers need it."""
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if isinstance(arg, str) and arg == "<dynamic-code>" else arg for arg in args)


def _reduce_function(fn: FunctionType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """If torch.compile has wrapped a function of `__main__`, leave out the globals of the wrapper's module."""
    module = sys.modules.get(name := fn.__globals__.get("__name__", ""))
    is_wrapper = fn.__module__ == "__main__" and name.partition(".")[0] == "torch"
    if not is_wrapper or getattr(module, "__dict__", None) is not fn.__globals__:
        return reduced
    make, (code, _, *others), (attributes, slots), *set_state = reduced
    slots["__globals__"] = {}
    return make, (code, _ModuleGlobals(module), *others), (attributes, slots), *set_state


def _reduce_stand_in(obj: Any) -> Any:
    """Pickle by its name an object that stands in for a module, such as `torch.backends.cudnn` or `torch.ops.aten`."""
    cls = type(obj)
    name = cls.__module__  # a module can replace itself by an instance of one of its classes
    if sys.modules.get(name) is not obj:
        if not issubclass(cls, ModuleType) or cls is ModuleType:
            return NotImplemented
        name = obj.__name__
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
    """Find the module of a class whose `__module__` is wrong: that of pytest's Skipped is "builtins"."""
    for base in cls.__mro__[1:]:
        module = sys.modules.get(base.__module__)
        # with vars(), since getattr() could make a module load something
        if module is not None and base.__module__ != "__main__" and vars(module).get(cls.__qualname__) is cls:
            return module
    return None


def _find_in_main(obj: Any, main: dict[str, Any]) -> str | None:
    """Return `Outer` for a class `Outer.Inner` of `__main__`, or None if pickle could not find the object there."""
    if obj.__module__ != "__main__":
        return None
    top, *rest = obj.__qualname__.split(".")
    found = main.get(top)
    for name in rest:
        found = vars(found).get(name) if isinstance(found, type) else None
    return top if found is obj else None


def _rebuild_cached(fn: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


class _ModuleGlobals(dict[str, Any]):
    """Stands for the globals of a module of the rank. cloudpickle would make a new dict of copies instead."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __reduce__(self) -> Any:
        return vars, (self.module,)
