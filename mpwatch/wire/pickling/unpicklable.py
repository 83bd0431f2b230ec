"""Which part of something cannot be pickled, as a path that a user recognises. Runs on either side, after a failure.

Walks from the object that failed to those it is made of, as pickle does, and into each that fails alone, until nothing
inside is to blame but the thing itself. In a cycle (a trainer, its parts, and the trainer that each of them knows) each
fails alone; what fails for no other reason than that is not blamed while there is something else.
"""

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_DEPTH = 30
MAX_PROBES = 20_000  # seconds of looking; then the path ends where it has come to
Part = tuple[str, Any]  # how the part is reached, after the path so far; the part


def find(path: str, thing: Any, dumps: Callable[[Any], object]) -> tuple[str, Any]:
    """The path to the innermost part of `thing` that `dumps` refuses, and that part.

    Args:
        path: what to call `thing`, for example "args[0]".
        thing: something that `dumps` raised for.
        dumps: pickles one object, or raises.
    """
    found = _Search(dumps, {id(thing): thing}, iter(range(MAX_PROBES))).innermost(path, thing, MAX_DEPTH)
    return found.path, found.thing


class _Found(NamedTuple):
    path: str
    thing: Any
    is_sure: bool  # False: it contains what it is a part of, which may be all that is wrong with it


@dataclass
class _Search:
    dumps: Callable[[Any], object]
    refused: dict[int, Any]  # by id: what has been looked into
    probes: Iterator[int]

    def innermost(self, path: str, thing: Any, depth: int) -> _Found:
        suspect = None
        leads_back = False
        for (step, part), _ in zip(_parts(thing), self.probes, strict=False):
            if id(part) in self.refused:
                leads_back = True
            elif depth and not _works(part, self.dumps):
                self.refused[id(part)] = part
                found = self.innermost(path + step, part, depth - 1)
                if found.is_sure:
                    return found
                suspect = suspect or found
        return suspect or _Found(path, thing, is_sure=not leads_back)


def _works(part: Any, dumps: Callable[[Any], object]) -> bool:
    try:
        dumps(part)
    except Exception:  # noqa: BLE001  that it fails is what we ask
        return False
    return True


def _parts(thing: Any) -> Iterator[Part]:
    if isinstance(thing, types.FunctionType):
        yield from _parts_of_function(thing)
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
        yield from _parts_of_instance(thing)


def _parts_of_function(fn: types.FunctionType) -> Iterator[Part]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield f" closes over {name!r}", cell.cell_contents
        except ValueError:  # an empty cell
            continue
    for name in _names(fn.__code__):
        if name in fn.__globals__:
            yield f" uses the global {name!r}", fn.__globals__[name]
    yield from ((f" has the default [{i}]", value) for i, value in enumerate(fn.__defaults__ or ()))
    yield from ((f" has the default {name!r}", value) for name, value in (fn.__kwdefaults__ or {}).items())
    yield from ((f".{name}", value) for name, value in vars(fn).items())


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names in a function and in those defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _parts_of_instance(thing: Any) -> Iterator[Part]:
    yield from ((f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items())
    for kind in type(thing).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(thing, name):
                yield f".{name}", getattr(thing, name)
    yield " has the class", type(thing)
