"""Find the object that pickling has refused, and the path to it, such as "args[0].model.lock"."""

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from typing import Any

from mpwatch.wire.pickling.call_payload import Payload, SpawnPopenStub

MAX_PARTS = 100_000  # to look at
ATOMS = (int, float, complex, str, bytes, types.NoneType)
Part = tuple[str, Any]  # the text that the part adds to the path, and the part itself


def find_refused(thing: Any, *, is_call: bool = False) -> tuple[Any, Exception] | None:
    """Return the part that cannot be pickled, and why. None if `thing` can be."""
    from mpwatch.wire.pickling.pickler import Pickler  # not at the top: it imports cloudpickle

    with closing(Payload()) as payload, SpawnPopenStub(payload.duplicate_fd) if is_call else nullcontext():
        pickler = Pickler(payload, payload.keep, is_call=is_call)
        try:
            pickler.dump(thing)
        except Exception as error:  # noqa: BLE001  pickling runs code of the user
            return pickler.last, error
    return None


def find_path(named: Iterable[Part], refused: Any) -> str | None:
    """Return the shortest path, which begins with a name in `named`. None if the object was made by pickling."""
    waiting = deque(named)
    seen = {id(thing) for _, thing in waiting}
    while waiting and len(seen) < MAX_PARTS:
        path, thing = waiting.popleft()
        if thing is refused:
            return path
        for step, part in _iterate_parts(thing):
            if id(part) not in seen and not isinstance(part, ATOMS) and not _is_imported(part):
                seen.add(id(part))
                waiting.append((path + step, part))
    return None


def _is_imported(part: Any) -> bool:
    """Return whether only the name of a module, function or class is sent."""
    from cloudpickle.cloudpickle import _lookup_module_and_qualname

    from mpwatch.wire.pickling.reducers import is_made_here

    is_definition = isinstance(part, types.FunctionType | type)
    found = _lookup_module_and_qualname(part) if is_definition else None
    return type(part) is types.ModuleType or (found is not None and not is_made_here(found[0]))


def _iterate_parts(thing: Any) -> Iterator[Part]:
    if isinstance(thing, types.FunctionType):
        yield from _iterate_function_parts(thing)
    elif isinstance(thing, types.MethodType):
        yield f", a method of {type(thing.__self__).__qualname__}: self", thing.__self__
        yield "", thing.__func__
    elif isinstance(thing, functools.partial):
        yield ".func", thing.func
        yield from ((f".args[{i}]", arg) for i, arg in enumerate(thing.args))
        yield from ((f".keywords[{name!r}]", arg) for name, arg in thing.keywords.items())
    elif isinstance(thing, Mapping):
        yield from ((f"[{key!r:.50}]", value) for key, value in thing.items())
        yield from ((f", key {key!r:.50}", key) for key in thing)
    elif isinstance(thing, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(thing))
    elif isinstance(thing, set | frozenset):
        yield from ((f", member {part!r:.50}", part) for part in thing)
    elif isinstance(thing, type):
        yield from ((f".{name}", part) for name, part in vars(thing).items() if not name.startswith("__"))
    else:
        yield from _iterate_instance_parts(thing)


def _iterate_function_parts(fn: types.FunctionType) -> Iterator[Part]:
    from mpwatch.wire.pickling.pickler import find_global_names

    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield f" closes over {name!r}", cell.cell_contents
        except ValueError:  # the cell is empty
            continue
    for name in find_global_names(fn.__code__):
        if name in fn.__globals__:
            yield f" uses the global {name!r}", fn.__globals__[name]
    yield from ((f" has the default [{i}]", value) for i, value in enumerate(fn.__defaults__ or ()))
    yield from ((f" has the default {name!r}", value) for name, value in (fn.__kwdefaults__ or {}).items())
    yield from ((f".{name}", value) for name, value in vars(fn).items())


def _iterate_instance_parts(thing: Any) -> Iterator[Part]:
    yield from ((f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items())
    for kind in type(thing).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(thing, name):
                yield f".{name}", getattr(thing, name)
    yield ".__class__", type(thing)
