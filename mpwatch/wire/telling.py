"""An exception taken apart, for exceptions.py to put together again. Runs in the rank, or wherever a failure is pickled.

`Telling.plain` runs nothing of the exceptions' own classes but `__str__` and properties, in Python, guarded one by one.
`Telling.details` pickles, and tries out what it has pickled: a class that exits or crashes there takes this process with
it, but not what has been told.
"""

import pickle
from collections.abc import Iterator
from types import GetSetDescriptorType, MemberDescriptorType, TracebackType
from typing import Any

from . import sources, values
from .exceptions import Link, Part, is_same_text, rebuild

__all__ = ["Telling"]

MAX_LINKS = 2000  # of causes, contexts and group members together; a graph beyond that is cut off
OWN_SLOTS = {"__cause__", "__context__", "__traceback__", "__suppress_context__", "__class__", "__dict__", "args"}


class Telling:
    """An exception and all that hangs on it, in the order in which both messages tell it."""

    def __init__(self, error: BaseException) -> None:
        found: dict[int, BaseException] = {}
        waiting = [error]
        while waiting and len(found) < MAX_LINKS:
            met = waiting.pop(0)
            if id(met) not in found:
                found[id(met)] = met
                waiting += _neighbours(met)
        self._errors = list(found.values())
        index = {key: number for number, key in enumerate(found)}
        self._links = [_link_of(met, index) for met in self._errors]

    def plain(self) -> bytes:
        """What happened, where, and how the exceptions hang together."""
        files = {frame[0] for link in self._links for frame in link["frames"]}
        told = {"links": self._links, "traceback": _printed(self._errors[0]), "sources": sources.of_files(files)}
        return pickle.dumps(told, protocol=5)

    def details(self) -> bytes:
        """What of each can be pickled and rebuilt."""
        parts = [_part_of(error, link) for error, link in zip(self._errors, self._links, strict=True)]
        return pickle.dumps(parts, protocol=5)


def _neighbours(error: BaseException) -> list[BaseException]:
    try:
        near = [e for e in (error.__cause__, error.__context__) if isinstance(e, BaseException)]
        return [*near, *(error.exceptions if isinstance(error, BaseExceptionGroup) else ())]
    except BaseException:  # noqa: BLE001  of a class that overrides what every exception has
        return []


def _link_of(error: BaseException, index: dict[int, int]) -> Link:
    try:
        return _whole_link(error, index)
    except BaseException as broken:  # noqa: BLE001  of a class that overrides what every exception has
        bare = _whole_link(Exception(f"<{type(broken).__name__} was raised when it was taken apart>"), index)
        return {**bare, "name": type(error).__name__}


def _whole_link(error: BaseException, index: dict[int, int]) -> Link:
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return {
        "name": type(error).__name__,
        "qualname": type(error).__qualname__,
        "module": type(error).__module__,
        "base": next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"),
        "text": _text(error),
        "message": str(error.message) if isinstance(error, BaseExceptionGroup) else "",
        "notes": _notes(error),
        "frames": _frames(error.__traceback__),
        "cause": index.get(id(error.__cause__)),
        "context": index.get(id(error.__context__)),
        "suppress": error.__suppress_context__,
        "members": [index[id(member)] for member in members if id(member) in index],
    }


def _part_of(error: BaseException, link: Link) -> Part | None:
    """The pickles that the link can be rebuilt from; None if it cannot be."""
    try:
        members = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []
        attributes = {name: data for name, value in _attributes(error) if (data := _dumps(value)) is not None}
        exact = {"exact": _dumps(error) if not members else None, "attributes": attributes}
        if exact["exact"] is not None and _comes_back(error, link, exact, members):
            return exact
        args = [_dumps_argument(arg) for arg in error.args] if not members else []
        parts = {"exact": None, "class": _dumps(type(error)), "args": args, "attributes": attributes}
        return parts if parts["class"] is not None and _comes_back(error, link, parts, members) else None
    except BaseException:  # noqa: BLE001  of a class that overrides what every exception has
        return None


def _comes_back(error: BaseException, link: Link, part: Part, members: list[BaseException]) -> bool:
    try:
        again = rebuild(link, part, members)
    except BaseException:  # noqa: BLE001  its own code runs here, and may raise anything
        return False
    return type(again) is type(error) and is_same_text(_text(again), link["text"])


def _dumps(value: Any) -> bytes | None:
    try:
        return values.dumps(value)
    except BaseException:  # noqa: BLE001  whatever a class does in __reduce__, sys.exit() included: this part is left out
        return None


def _dumps_argument(arg: Any) -> bytes:
    data = _dumps(arg)
    if data is not None:
        try:
            values.loads(data)
        except BaseException:  # noqa: BLE001, S110  what it is made of cannot be rebuilt
            pass
        else:
            return data
    return values.dumps(_repr(arg))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001
        return f"<its __str__ raised {type(broken).__name__}>"


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except BaseException:  # noqa: BLE001
        return f"<{type(value).__qualname__}>"


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list | tuple) else []


def _attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    """What is in its __dict__, and in the slots of its classes, builtin (SystemExit.code, OSError.filename) and own."""
    yield from ((name, value) for name, value in vars(error).items() if name != "__notes__")
    for base in type(error).__mro__:
        for name, descriptor in vars(base).items():
            if isinstance(descriptor, MemberDescriptorType | GetSetDescriptorType) and name not in OWN_SLOTS:
                try:
                    if (value := getattr(error, name)) is not None:  # OSError tells an unset filename2 from one that is None
                        yield name, value
                except BaseException:  # noqa: BLE001, S112  an empty slot
                    continue


def _printed(error: BaseException) -> str:
    import traceback

    try:
        return "".join(traceback.format_exception(error))
    except BaseException as broken:  # noqa: BLE001  a __str__ or a __notes__ that raises
        return f"(its traceback could not be printed: {type(broken).__name__})"


def _frames(trace: TracebackType | None) -> list[tuple[str, str, int, str]]:
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        module = str(trace.tb_frame.f_globals.get("__name__", "?"))
        line = trace.tb_lineno or 0  # code that was generated may have no lines
        frames.append((code.co_filename, code.co_name, line, module))
        trace = trace.tb_next
    return frames
