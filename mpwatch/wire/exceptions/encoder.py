"""An exception taken apart, for exceptions.py to put together again. Runs in the rank, or wherever a failure is pickled.

`Telling.plain` runs nothing of the exceptions' own classes but `__str__` and `__notes__`, each guarded.
`Telling.details` pickles, and tries out what it has pickled: a class that exits or crashes there takes this process with
it, but not what has been told.
"""

import marshal
import pickle
from collections.abc import Callable, Iterator
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.exceptions.decoder import ExceptionNode, PickledParts, is_builtin, is_same_text, own, rebuild
from mpwatch.wire.exceptions.tracebacks import frames_of
from mpwatch.wire.pickling import return_values

MAX_LINKS = 2000  # of causes, contexts and group members together; a graph beyond that is cut off
MAX_TEXT = 1 << 20  # characters of one text; what is longer is cut off
TOLD = {"__cause__", "__context__", "__traceback__", "__suppress_context__", "__class__", "__dict__", "__notes__", "args"}
TOLD_OF_GROUPS = {"exceptions", "message"}


class ExceptionEncoder:
    """An exception and all that hangs on it, in the order in which both messages tell it: itself first, then the nearest.

    `links` has what is told of each, in builtin types alone.
    """

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
        self.links = [_link_of(met, index) for met in self._errors]

    def plain(self) -> bytes:
        """What happened, where, and how the exceptions hang together."""
        files = {frame[0] for link in self.links for frame in link["frames"]}
        told = {"links": self.links, "traceback": _printed(self._errors[0]), "sources": source_lines.of_files(files)}
        return marshal.dumps(told)

    def details(self) -> bytes:
        """What of each can be pickled and rebuilt."""
        parts = [_part_of(error, link) for error, link in zip(self._errors, self.links, strict=True)]
        return pickle.dumps(parts, protocol=5)


def _neighbours(error: BaseException) -> list[BaseException]:
    near = [own(error, "__cause__"), own(error, "__context__"), *_members(error)]
    return [e for e in near if e is not None]


def _is_group(error: BaseException) -> bool:
    return issubclass(type(error), BaseExceptionGroup)  # isinstance() asks the object, which may have its own answer


def _members(error: BaseException) -> tuple[BaseException, ...]:
    found: tuple[BaseException, ...] = ()
    if _is_group(error):
        found = BaseExceptionGroup.__dict__["exceptions"].__get__(error)
    return found


def _link_of(error: BaseException, index: dict[int, int]) -> ExceptionNode:
    cls = type(error)
    is_group = _is_group(error)
    return {
        "name": _name(cls, "__name__"),
        "qualname": _name(cls, "__qualname__"),
        "module": _exact_text(lambda: cls.__module__),
        "bases": _builtin_bases(cls),
        "text": _text(error),
        "message": _exact_text(lambda: BaseExceptionGroup.__dict__["message"].__get__(error)) if is_group else "",
        "notes": _notes(error),
        "frames": frames_of(own(error, "__traceback__")),
        "cause": index.get(id(own(error, "__cause__"))),
        "context": index.get(id(own(error, "__context__"))),
        "suppress": own(error, "__suppress_context__"),
        "members": [index[id(member)] for member in _members(error) if id(member) in index],
    }


def _name(cls: type, name: str) -> str:
    text: str = type.__dict__[name].__get__(cls)  # a metaclass may say something else
    return str.__str__(text)


def _builtin_bases(cls: type) -> list[str]:
    """The nearest builtin exceptions that it is derived from, none of them derived from another."""
    found: list[type] = []
    for base in cls.__mro__:
        is_ancestor = is_builtin(base) and issubclass(base, BaseException)
        if is_ancestor and not any(issubclass(other, base) for other in found):
            found.append(base)
    return [base.__name__ for base in found]


def _part_of(error: BaseException, link: ExceptionNode) -> PickledParts | None:
    """The pickles that the link can be rebuilt from; None if it cannot be."""
    try:
        members = list(_members(error))
        attributes = {name: data for name, value in _attributes(error) if (data := _dumps_back(value)) is not None}
        if not members:
            exact = _exact(error, link, attributes)
            if exact is not None:
                return exact
        args = [_dumps_back(arg) or return_values.dumps(_repr(arg)) for arg in own(error, "args")] if not members else []
        parts = {"exact": None, "class": _dumps_back(type(error)), "args": args, "attributes": attributes}
        return parts if parts["class"] is not None and _comes_back(error, link, parts, members) else None
    except BaseException:  # noqa: BLE001  of a class that overrides what every exception has
        return None


def _exact(error: BaseException, link: ExceptionNode, attributes: dict[str, bytes]) -> PickledParts | None:
    """As it pickles itself, and those attributes that this leaves out: pickle knows nothing of slots."""
    data = _dumps(error)
    if data is None:
        return None
    bare = {"exact": data, "attributes": {}}
    try:
        again = rebuild(link, bare, [])
        missing = {name: kept for name, kept in attributes.items() if _dumps(getattr(again, name, _nothing)) != kept}
    except BaseException:  # noqa: BLE001  its own code runs here, and may raise anything
        return None
    part = {**bare, "attributes": missing}
    return part if _comes_back(error, link, part, []) else None


def _comes_back(error: BaseException, link: ExceptionNode, part: PickledParts, members: list[BaseException]) -> bool:
    try:
        again = rebuild(link, part, members)
    except BaseException:  # noqa: BLE001  its own code runs here, and may raise anything
        return False
    if type(again) is not type(error):
        return False
    if is_same_text(_text(again), link["text"]):
        return True
    # a set among its arguments prints in another order
    return type(error).__str__ is BaseException.__str__ and len(own(again, "args")) == len(own(error, "args"))


def _nothing() -> None:
    """No attribute has this for its value."""


def _dumps(value: Any) -> bytes | None:
    try:
        return return_values.dumps(value)
    except BaseException:  # noqa: BLE001  whatever a class does in __reduce__, sys.exit() included: this part is left out
        return None


def _dumps_back(value: Any) -> bytes | None:
    """A pickle that can be undone; None if there is none."""
    data = _dumps(value)
    if data is not None:
        try:
            return_values.loads(data)
        except BaseException:  # noqa: BLE001  what it is made of cannot be rebuilt
            return None
    return data


def _exact_text(make: Callable[[], Any]) -> str:
    """A string proper, whatever a class makes of it: a class of strings would be its own to pickle."""
    try:
        text = make()
        return str.__str__(text)[:MAX_TEXT] if isinstance(text, str) else ""
    except BaseException:  # noqa: BLE001
        return ""


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))[:MAX_TEXT]
    except BaseException as broken:  # noqa: BLE001
        return f"<its __str__ raised {type(broken).__name__}>"


def _repr(value: Any) -> str:
    try:
        return str.__str__(repr(value))[:MAX_TEXT]
    except BaseException:  # noqa: BLE001
        return f"<{type(value).__qualname__}>"


def _notes(error: BaseException) -> list[str]:
    try:
        notes = getattr(error, "__notes__", ())
        return [str.__str__(note)[:MAX_TEXT] for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    except BaseException:  # noqa: BLE001
        return []


def _attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    """What is in its __dict__, and in the slots of its classes, builtin (SystemExit.code, OSError.filename) and own."""
    told = TOLD | TOLD_OF_GROUPS if _is_group(error) else TOLD
    yield from ((name, value) for name, value in own(error, "__dict__").items() if name not in told)
    for base in type(error).__mro__:
        for name, descriptor in vars(base).items():
            if isinstance(descriptor, MemberDescriptorType | GetSetDescriptorType) and name not in told:
                try:
                    if (value := getattr(error, name)) is not None:  # OSError tells an unset filename2 from one that is None
                        yield name, value
                except BaseException:  # noqa: BLE001, S112  an empty slot
                    continue


def _printed(error: BaseException) -> str:
    import traceback

    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as broken:  # noqa: BLE001  a __str__ or a __notes__ that raises
        return f"(its traceback could not be printed: {type(broken).__name__})"
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n[...]\n{text[-MAX_TEXT // 2 :]}"
