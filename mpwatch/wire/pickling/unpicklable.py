"""Find the innermost part of an object that cannot be pickled, with its path, such as "args[0].model.lock".

If a trainer has a lock and a callback, and the callback refers back to the trainer, neither the callback nor the lock can be
pickled. So the search prefers a part that does not lead back to an object on its path: the lock.
"""

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_DEPTH = 30
MAX_PROBES = 20_000  # parts to try, which takes seconds. After that the result is the innermost object so far
Part = tuple[str, Any]  # the text that the part adds to the path, and the part itself


def find_unpicklable(path: str, thing: Any, dumps: Callable[[Any], object]) -> tuple[str, Any]:
    """Return the path and the part. `path` is the name of `thing`, such as "args[0]", and `dumps` raises for `thing`."""
    found = _Search(dumps, {id(thing): thing}, iter(range(MAX_PROBES))).find_innermost(path, thing, MAX_DEPTH)
    return found.path, found.thing


class _Found(NamedTuple):
    path: str
    thing: Any
    is_sure: bool  # False if the part refers back to an object on the path, which may be the only reason


@dataclass
class _Search:
    dumps: Callable[[Any], object]
    refused: dict[int, Any]  # the objects for which `dumps` has raised, by id
    probes: Iterator[int]

    def find_innermost(self, path: str, thing: Any, depth: int) -> _Found:
        unsure = None
        leads_back = False
        for (step, part), _ in zip(_iterate_parts(thing), self.probes, strict=False):
            if id(part) in self.refused:
                leads_back = True
            elif depth and not _can_be_pickled(part, self.dumps):
                self.refused[id(part)] = part
                found = self.find_innermost(path + step, part, depth - 1)
                if found.is_sure:
                    return found
                unsure = unsure or found
        return unsure or _Found(path, thing, is_sure=not leads_back)


def _can_be_pickled(part: Any, dumps: Callable[[Any], object]) -> bool:
    try:
        dumps(part)
    except Exception:  # noqa: BLE001  any exception answers the question
        return False
    return True


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
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield f" closes over {name!r}", cell.cell_contents
        except ValueError:  # the cell is empty
            continue
    for name in _iterate_global_names(fn.__code__):
        if name in fn.__globals__:
            yield f" uses the global {name!r}", fn.__globals__[name]
    yield from ((f" has the default [{i}]", value) for i, value in enumerate(fn.__defaults__ or ()))
    yield from ((f" has the default {name!r}", value) for name, value in (fn.__kwdefaults__ or {}).items())
    yield from ((f".{name}", value) for name, value in vars(fn).items())


def _iterate_global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _iterate_global_names(constant)


def _iterate_instance_parts(thing: Any) -> Iterator[Part]:
    yield from ((f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items())
    for kind in type(thing).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(thing, name):
                yield f".{name}", getattr(thing, name)
    yield " has the class", type(thing)
