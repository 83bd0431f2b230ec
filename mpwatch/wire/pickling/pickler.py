"""The pickler of everything that mpwatch sends: cloudpickle, with definitions of its own (definitions.py).

What a fresh process cannot import travels by value: functions, classes, type variables and the like of `__main__`, of local
scopes, and of modules that have no file. What a rank sends back of the caller's `__main__` is only named, so that the caller
gets its own functions and classes.

cloudpickle makes a class again. That loses keywords of the class, attributes of Enum members, and attributes that equal
those of a base. It copies the globals of other modules into wrappers of decorators. And if an object answers with a name in
`__main__`, it supposes that the receiver has this name.
"""

import abc
import copyreg
import dis
import io
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from pickle import PickleBuffer
from types import CellType, CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, ForwardRef, TypeVar
from weakref import WeakKeyDictionary

import cloudpickle
from cloudpickle import cloudpickle as internals

from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.pickling import definitions
from mpwatch.wire.pickling.definitions import Loaded, get_id
from mpwatch.wire.pickling.reducers import Reduced, get_table, is_made_here

GLOBAL_OPS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
READERS_OF_NAMES = {"globals", "eval", "exec"}
TYPING_MODULES = {"typing", "types", "typing_extensions"}
MODULE_NAMES = ("__package__", "__name__", "__path__", "__file__")
WORDS = re.compile(r"[^\W\d]\w*")
CLASS_BODY = ("__module__", "__slots__", "__firstlineno__")  # what the class is made with
GET_ATTRIBUTES = attrgetter(*definitions.FUNCTION_ATTRIBUTES)
_NUMBERS = ("argcount", "posonlyargcount", "kwonlyargcount", "nlocals", "stacksize", "flags", "code", "consts", "names")
_TEXTS = ("varnames", "filename", "name", "qualname", "firstlineno", "linetable", "exceptiontable", "freevars", "cellvars")
GET_CODE_ARGS = attrgetter(*(f"co_{name}" for name in (*_NUMBERS, *_TEXTS)))  # in the order of the arguments of CodeType
MADE_WITH_CLASS = MemberDescriptorType | GetSetDescriptorType
NEW_OBJECT: Any = vars(copyreg)["__newobj__"]
HEAP_TYPE = 1 << 9  # in `type.__flags__`: not a class of C
NOTHING: dict[str, Any] = {}
EMPTY_CELL = CellType()
Keep = Callable[[PickleBuffer], bool | None]


def pack_by_value(value: object, keep: Keep | None = None) -> bytes:
    """Pickle a value for another program that uses mpwatch. If it sends back a class of `__main__`, this program gets its
    own.
    """
    stream = io.BytesIO()
    Pickler(stream, keep).dump(value)
    return stream.getvalue()


class Pickler(cloudpickle.Pickler):
    """A pickler of a call in the caller, or of a value or an exception in any process.

    `keep` takes large buffers; without it they are in the pickle. With `is_call`, the receiver gets the values that the
    globals of this process have now.
    """

    def __init__(self, stream: Any, keep: Keep | None = None, *, is_call: bool = False) -> None:
        self.dispatch_table = get_table(for_call=is_call)  # before __init__, in which the C pickler reads it
        super().__init__(stream, protocol=5, buffer_callback=keep)
        self.last: Any = None  # the object that has just been reduced. If pickling fails, it is the one that was refused
        self.is_call = is_call
        self.main = vars(sys.modules["__main__"])
        self.by_name = {} if is_call else definitions.received
        self.plain_kinds: set[type] = set()  # of objects about which nothing is special
        self.namespaces: dict[int, Any] = {}  # what stands for the globals of a module, by id
        self.modules: set[str] = set()  # that the receiver imports
        self.sources: dict[str, dict[str, str]] = {}  # of the files of code

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        kind = type(obj)
        if kind in self.plain_kinds:
            return self._reduce_object(obj)
        if issubclass(kind, type):
            return self._reduce_class(obj)
        if kind is FunctionType:
            is_named = obj.__globals__ is vars(definitions) or self._is_named(obj)
            return NotImplemented if is_named else self._reduce_function(obj)
        if kind is CodeType:
            return self._reduce_code(obj)
        if issubclass(kind, ModuleType):
            self.modules.add(obj.__name__)
        if kind in self.dispatch_table:
            return NotImplemented
        if issubclass(kind, ModuleType) or sys.modules.get(kind.__module__) is obj:
            return _reduce_stand_in(obj)
        if issubclass(kind, Enum) and not self._is_named(kind):
            return _reduce_member(obj)
        if (numpy := sys.modules.get("numpy")) and issubclass(kind, numpy.ndarray) and not issubclass(kind, numpy.memmap):
            from mpwatch.wire.pickling.numpy_arrays import reduce_subclass

            return reduce_subclass(obj)
        if not isinstance(sys.modules.get(kind.__module__), kind):
            self.plain_kinds.add(kind)
        return self._reduce_object(obj)

    # --- Where a definition belongs

    def _is_named(self, obj: Any, name: str | None = None) -> bool:
        """Return whether the receiver has this function, class or other named object."""
        name = name or _name_of(obj)
        if getattr(obj, "__module__", None) in definitions.MAIN_NAMES:
            top, found = _resolve(self.main, name)
            return found is obj and top in self.by_name and self.main[top] is self.by_name[top]
        found = internals._lookup_module_and_qualname(obj, name)
        if found is None or _travels(found[0]):
            return False
        self.modules.add(found[0].__name__)
        return True

    def _get_namespace(self, names: dict[str, Any]) -> Any:
        """Return what the receiver loads as the globals of a module, or as those of functions that are in no module."""
        if id(names) not in self.namespaces:
            name = names.get("__name__")
            module = sys.modules.get(name) if isinstance(name, str) else None
            found: Any = {key: names[key] for key in MODULE_NAMES if key in names}
            if getattr(module, "__dict__", None) is names:
                if _is_library(module):
                    found = Loaded(vars, module)
                elif self.is_call and is_made_here(module):
                    found = Loaded(definitions.get_namespace, name)
            self.namespaces[id(names)] = found
        return self.namespaces[id(names)]

    def _find_globals(
        self, obj: Any, names: dict[str, Any], wanted: Iterable[str] = (), texts: Iterable[str] = (), name: str | None = None
    ) -> list[tuple[Any, dict[str, Any]]]:
        """Return what the receiver puts into namespaces: the globals that a definition uses (also in the `texts` of
        annotations), and the definition itself, or `Outer` for `Outer.Inner`.
        """
        puts = []
        namespace = self._get_namespace(names)
        if not (isinstance(namespace, Loaded) and namespace.make is vars):
            used = {name: names[name] for name in wanted if name in names}
            for each in {name for text in texts for name in WORDS.findall(text)}:
                if each in names and _is_type(names[each]):
                    used[each] = names[each]
            puts.append((namespace, used))
        home = _module_of(obj)
        if self.is_call and home is not None and is_made_here(home):
            top, found = _resolve(vars(home), name or _name_of(obj))
            if found is obj:
                puts.append((self._get_namespace(vars(home)), {top: vars(home)[top]}))
        return puts

    # --- Functions

    def _reduce_function(self, fn: FunctionType) -> Reduced:
        annotations = _get_annotations(fn)
        puts = self._find_globals(fn, fn.__globals__, find_global_names(fn.__code__), _iterate_texts(annotations))
        state = GET_ATTRIBUTES(fn), annotations, vars(fn), puts, _find_submodules(fn, puts)
        args = fn.__code__, self._get_namespace(fn.__globals__), fn.__closure__
        return definitions.make_function, args, state, None, None, definitions.fill_function

    def _reduce_code(self, code: CodeType) -> Reduced:
        name = code.co_filename
        if name not in self.sources:
            self.sources[name] = source_lines.collect([name])
        return definitions.make_code, (GET_CODE_ARGS(code), self.sources[name])

    # --- Classes

    def _reduce_class(self, cls: Any) -> Any:
        if cls in internals._BUILTIN_TYPE_NAMES:
            return getattr, (sys.modules["types"], internals._BUILTIN_TYPE_NAMES[cls])
        if self._is_named(cls):
            return NotImplemented
        module = _find_defining_module(cls)
        if module is not None:
            return getattr, (module, cls.__qualname__)
        if not cls.__flags__ & HEAP_TYPE:
            return NotImplemented
        if hasattr(cls, "__struct_config__"):
            raise TypeError("a msgspec.Struct can be sent only if it is defined in a module")
        attributes = {
            name: value
            for name, value in vars(cls).items()
            # made with the class: slots, `__dict__` and `__weakref__`, and the fields of ctypes
            if not (isinstance(value, MADE_WITH_CLASS) and value.__objclass__ is cls) and type(value).__name__ != "CField"
        }
        body = {name: attributes.pop(name) for name in CLASS_BODY if name in attributes}
        body["__qualname__"] = cls.__qualname__
        registered = []
        if attributes.pop("_abc_impl", None) is not None:
            registered = [each for ref in abc._get_dump(cls)[0] if (each := ref()) is not None]  # type: ignore[attr-defined]
        if issubclass(cls, Enum) and "_value2member_map_" in attributes:  # combinations of flags are made again when needed
            members = attributes["_member_map_"]
            of_values = attributes["_value2member_map_"].items()
            attributes["_value2member_map_"] = {value: each for value, each in of_values if each._name_ in members}
        annotations = _get_annotations(cls)
        if annotations and "__annotations__" not in attributes:  # Python 3.14
            attributes["__annotations__"] = annotations
        for name in ("__annotate_func__", "__annotations_cache__"):
            attributes.pop(name, None)
        puts = self._find_globals(cls, getattr(_module_of(cls), "__dict__", NOTHING), texts=_iterate_texts(annotations))
        state = attributes, registered, puts, self.is_call
        meta = None if type(cls) is type(cls.__bases__[0]) else type(cls)
        args = get_id(cls), definitions.make_class, meta, cls.__name__, cls.__bases__, body
        return definitions.make_named, args, state, None, None, definitions.fill_class

    # --- Other objects

    def _reduce_object(self, obj: Any) -> Any:
        """Ask the object. It may answer with a name that the receiver lacks, or have nothing but its name in a module."""
        reduced = obj.__reduce_ex__(5)
        if isinstance(reduced, str):
            module = _module_of(obj)
            if self._is_named(obj, reduced) or not (type(obj) in REDUCE_NAMED or (module and _travels(module))):
                return reduced
            make, args, own = REDUCE_NAMED.get(type(obj), _reduce_plainly)(obj)
            state: Reduced = own, self._find_globals(obj, NOTHING, name=reduced)
            return definitions.make_named, (get_id(obj), make, *args), state, None, None, definitions.fill_named
        if reduced[0] is NEW_OBJECT and len(reduced[1]) == 1 and not any(reduced[2:]):
            module = _module_of(type(obj))
            if module is not None and not _travels(module):
                for name, value in vars(module).items():
                    if value is obj:  # dataclasses.MISSING, for example
                        return getattr, (module, name)
        return reduced


# --- Modules


def _travels(module: Any) -> bool:
    """Return whether what the module defines is sent by value: no other process can import the module, or should."""
    return internals._is_registered_pickle_by_value(module) or is_made_here(module)


def _is_library(module: Any) -> bool:
    """Return whether nothing in the module is of this program: what its functions use is in a rank, too."""
    is_of_python = module.__name__.partition(".")[0] in sys.stdlib_module_names
    return is_of_python or "-packages" in (getattr(module, "__file__", None) or "")


def _reduce_stand_in(obj: Any) -> Any:
    """Pickle by its name an object that stands in for a module, such as `torch.backends.cudnn` or `torch.ops.aten`."""
    cls = type(obj)
    # a module can replace itself by an instance of one of its classes
    name = cls.__module__ if sys.modules.get(cls.__module__) is obj else obj.__name__
    home = sys.modules.get(cls.__module__)
    if home is not None and home is not obj and _travels(home):
        return NotImplemented
    if sys.modules.get(name) is obj:
        return import_module, (name,)
    parent, _, attribute = name.rpartition(".")
    module = sys.modules.get(parent)
    return (getattr, (module, attribute)) if getattr(module, "__dict__", {}).get(attribute) is obj else NotImplemented


# --- Names


def _module_of(obj: Any) -> Any:
    return sys.modules.get(getattr(obj, "__module__", None))  # type: ignore[arg-type]


def _name_of(obj: Any) -> str:
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", ""))


def _resolve(names: dict[str, Any], name: str) -> tuple[str, Any]:
    """Return `Outer` and the class, for the name `Outer.Inner` of a class."""
    top, *rest = name.split(".")
    found = names.get(top)
    for each in rest:
        found = vars(found).get(each) if isinstance(found, type) else None
    return top, found


def _find_defining_module(cls: type) -> Any:
    """Find the module of a class whose `__module__` is wrong: that of pytest's Skipped is "builtins"."""
    for base in cls.__mro__[1:]:
        module = _module_of(base)
        # with vars(), since getattr() could make a module load something
        if module is not None and not _travels(module) and vars(module).get(cls.__qualname__) is cls:
            return module
    return None


_global_names: WeakKeyDictionary[CodeType, dict[str, None]] = WeakKeyDictionary()


def find_global_names(code: CodeType) -> dict[str, None]:
    """Return the names of globals that the code uses, those in its local classes too, and in `globals()["name"]`."""
    names = _global_names.get(code)
    if names is None:
        names = {each.argval: None for each in dis.get_instructions(code) if each.opname in GLOBAL_OPS}
        if not names.keys().isdisjoint(READERS_OF_NAMES):
            names.update((each, None) for each in code.co_consts if isinstance(each, str) and each.isidentifier())
        for each in code.co_consts:
            if isinstance(each, CodeType):
                names.update(find_global_names(each))
        _global_names[code] = names
    return names


def _find_submodules(fn: FunctionType, puts: list[tuple[Any, dict[str, Any]]]) -> list[ModuleType]:
    """Return the modules that a function finds as attributes of packages, as in `concurrent.futures.wait`."""
    values = [value for _, used in puts for value in used.values()]
    values += (cell.cell_contents for cell in fn.__closure__ or () if cell != EMPTY_CELL)
    packages = [each for each in values if isinstance(each, ModuleType) and hasattr(each, "__path__")]
    found: dict[str, ModuleType] = {}
    for package in packages:
        for name in fn.__code__.co_names:
            part = sys.modules.get(full := f"{package.__name__}.{name}")
            if part is not None and full not in found:
                found[full] = part
                packages.append(part)
    return list(found.values())


def _get_annotations(obj: Any) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        try:
            return dict(get_annotations(obj))
        except NameError:  # of a type that exists only for type checkers
            return dict(get_annotations(obj, format=Format.STRING))
    return (vars(obj) if isinstance(obj, type) else {"__annotations__": obj.__annotations__}).get("__annotations__") or {}


def _iterate_texts(annotations: Mapping[str, Any]) -> Iterator[str]:
    """Iterate over what is text in annotations, as in `list["Node"]`."""
    parts = list(annotations.values())
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, ForwardRef):
            yield part.__forward_arg__
        elif not isinstance(part, type):
            parts += getattr(part, "__args__", ())


def _is_type(value: object) -> bool:
    return isinstance(value, type | FunctionType | ModuleType) or type(value).__module__ in TYPING_MODULES


# --- Reducers


def _reduce_member(member: Any) -> Any:
    """Pickle a member of an Enum as the object that it is. Python would ask its class, which may not be filled yet."""
    cls = type(member)
    if cls._member_map_.get(member._name_) is not member:
        return cls, (member._value_,)
    reduced: Any = object.__reduce_ex__(member, 5)
    args = cls, member._name_, cls._member_type_, reduced[1][1:] if reduced[0] is NEW_OBJECT else reduced[1]
    return definitions.make_member, args, vars(member), None, None, definitions.fill_member


def _reduce_type_variable(thing: Any) -> Reduced:
    options = {name: value for name in TYPE_OPTIONS if (value := getattr(thing, f"__{name}__", None))}
    if getattr(thing, "has_default", bool)():
        options["default"] = thing.__default__
    args = (
        thing.__name__,
        *getattr(thing, "__constraints__", ()),
        *([thing.__value__] if hasattr(thing, "__value__") else []),
    )
    return definitions.call_in, (thing.__module__, type(thing), args, options), {}


def _reduce_cached(fn: Any) -> Reduced:
    return definitions.make_cached, (fn.__wrapped__, fn.cache_parameters()), vars(fn)


def _reduce_plainly(obj: Any) -> Reduced:
    state = obj.__getstate__()
    parts = state if isinstance(state, tuple) else (state,)  # with slots, a pair
    return NEW_OBJECT, (type(obj),), {name: value for part in parts if part for name, value in part.items()}


# for objects that pickle would only name
TYPE_OPTIONS = ("bound", "covariant", "contravariant", "infer_variance", "type_params")
REDUCE_NAMED: dict[type, Callable[[Any], Reduced]] = {
    type(lru_cache(len)): _reduce_cached,
    **{getattr(typing, name, TypeVar): _reduce_type_variable for name in ("ParamSpec", "TypeVarTuple", "TypeAliasType")},
    TypeVar: _reduce_type_variable,
}
