"""A definition is a function, a class or another named object that travels by value. This is how a process gets one.

    [ make: empty, but one can refer to it ][ fill: the contents that it has in the sender ][ put: its name in its module ]

Nothing that has made a definition runs again: no decorator, no metaclass, no `__init_subclass__`, no `__set_name__`. So
nothing is lost of what they have done, whatever arguments they had. Definitions can refer to each other, since all are made
before one is filled. And plain pickle, torch.save and the workers of a DataLoader find them in `__main__`.

pickler.py has the sender's half. This half imports little, because each rank of a script needs it.
"""

from __future__ import annotations

import builtins
import sys
from functools import lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType, WrapperDescriptorType
from weakref import WeakKeyDictionary, WeakValueDictionary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

FUNCTION_ATTRIBUTES: tuple[str, ...] = (
    "__name__",
    "__qualname__",
    "__module__",
    "__doc__",
    "__defaults__",
    "__kwdefaults__",
)
FUNCTION_ATTRIBUTES += ("__type_params__",) if sys.version_info >= (3, 12) else ()
# A process that multiprocessing has spawned knows its script by the second name. `sys.modules` has both in each process.
MAIN_NAMES = ("__main__", "__mp_main__")
received: dict[str, object] = {}  # in a rank: what has come from the caller's `__main__`, by name
# The identity of a definition in all processes: what is sent back is the object that was sent.
_ids: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_by_id: WeakValueDictionary[str, Any] = WeakValueDictionary()
_unfilled: set[int] = set()  # ids of objects between make and fill


class Loaded:
    """In the sender: what the receiver loads by a call."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self.make = make
        self.args = args

    def __reduce__(self) -> Any:
        return self.make, self.args


def get_id(thing: Any) -> str | None:
    try:
        if thing not in _ids:
            import uuid

            _remember(uuid.uuid4().hex, thing)
        return _ids[thing]
    except TypeError:  # it has no hash, or no weak reference
        return None


def _remember(number: str | None, thing: Any) -> None:
    if number is not None:
        _ids[thing] = number
        _by_id[number] = thing


def make_module(name: str) -> ModuleType:
    """Return a module that does not exist outside the programs that have made it, such as `__main__`."""
    return sys.modules.setdefault(name, ModuleType(name))


def get_namespace(name: str) -> dict[str, Any]:
    return vars(make_module(name))


def _put(puts: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for namespace, names in puts:
        namespace.update(names)
        if namespace is vars(sys.modules["__main__"]):
            received.update(names)


# --- Functions


def make_cell() -> CellType:
    return CellType()


def fill_cell(cell: CellType, content: tuple[object]) -> None:
    (cell.cell_contents,) = content


def make_function(code: Any, namespace: dict[str, Any], closure: Any) -> FunctionType:
    namespace.setdefault("__builtins__", vars(builtins))  # from where code in C imports modules
    return FunctionType(code, namespace, code.co_name, None, closure)


def fill_function(fn: FunctionType, state: Any) -> None:
    attributes, annotations, own, puts, _ = state  # the last are modules, which had to be imported
    fn.__annotations__ = annotations
    for name, value in zip(FUNCTION_ATTRIBUTES, attributes, strict=True):
        setattr(fn, name, value)
    vars(fn).update(own)
    _put(puts)


def make_code(args: Any, sources: dict[str, str]) -> CodeType:
    if sources:
        from mpwatch.wire.exceptions import source_lines

        source_lines.add_to_linecache(sources)
    return CodeType(*args)


# --- Classes


def make_class(meta: Any, name: str, bases: Any, body: dict[str, Any]) -> Any:
    meta = meta or type(bases[0])
    hidden = list(_hide_hooks(bases))
    try:
        cls = _find_in_c(meta, "__new__")(meta, name, bases, body)
        _find_in_c(meta, "__init__")(cls, name, bases, body)
    finally:
        for base, hook in hidden:
            type.__setattr__(base, "__init_subclass__", hook)
    if hasattr(meta, "register"):
        from abc import ABCMeta

        if issubclass(meta, ABCMeta):
            from _abc import _abc_init  # type: ignore[import-not-found]

            _abc_init(cls)
    return cls


def _find_in_c(meta: Any, name: str) -> Any:
    """Return a method of `type`, or of a metaclass in C. The metaclasses in Python did their work in the sender."""
    methods = (vars(base).get(name) for base in meta.__mro__)
    return next(method for method in methods if isinstance(method, BuiltinFunctionType | WrapperDescriptorType))


def _hide_hooks(bases: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    """Let no `__init_subclass__` run: it needs the class with its contents, and the keywords of the class statement."""
    for base in {base for each in bases for base in each.__mro__}:
        hook = vars(base).get("__init_subclass__")
        if hook is not None:
            try:
                type.__setattr__(base, "__init_subclass__", classmethod(lambda *_, **__: None))
            except TypeError:  # the class is of C, as `object`
                continue
            yield base, hook


def fill_class(cls: Any, state: Any) -> None:
    attributes, registered, puts, overwrite = state
    if id(cls) in _unfilled or overwrite:
        _unfilled.discard(id(cls))
        set_attribute = _find_in_c(type(cls), "__setattr__")
        for name, value in attributes.items():
            if name != "_fields_" or name not in vars(cls):  # those of ctypes can be set only once
                set_attribute(cls, name, value)
        for each in registered:
            cls.register(each)
        _put(puts)


# --- Other named objects


def make_member(cls: Any, name: str, base: Any, args: tuple[Any, ...]) -> Any:
    """Make a member of an Enum that travels by value."""
    members = vars(cls).get("_member_map_", {})
    return members[name] if name in members else base.__new__(cls, *args)


def fill_member(member: Any, state: dict[str, Any]) -> None:
    if not vars(member):
        vars(member).update(state)


def fill_attributes(thing: Any, state: dict[str, Any]) -> None:
    vars(thing).update(state)


def make_named(number: str | None, make: Callable[..., Any], *args: Any) -> Any:
    thing = _by_id.get(number) if number is not None else None
    if thing is None:
        thing = make(*args)
        _remember(number, thing)
        _unfilled.add(id(thing))
    return thing


def fill_named(thing: Any, state: Any) -> None:
    own, puts = state
    if id(thing) in _unfilled:
        _unfilled.remove(id(thing))
        for name, value in own.items():
            setattr(thing, name, value)
    _put(puts)


def call_in(module: str, make: Callable[..., Any], args: Iterable[Any], options: dict[str, Any]) -> Any:
    """Call `make` as code of this module does: a type variable takes its `__module__` from its caller."""
    names = {"__name__": module, "make": make, "args": args, "options": options}
    return eval("make(*args, **options)", names)  # noqa: S307  the text is a constant


def make_cached(fn: Any, parameters: dict[str, Any]) -> Any:
    return lru_cache(**parameters)(fn)


def make_dead_reference() -> Any:
    from weakref import ref

    return ref(ModuleType(""))
