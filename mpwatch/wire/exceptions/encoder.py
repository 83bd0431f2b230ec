"""Encodes an exception for the watcher.

This module runs in the rank, and in any process that pickles a ProcessFailure.

An exception refers to its cause and its context, and an exception group also refers to its members. So the exceptions form a
graph, and each exception is a node of this graph. `ExceptionEncoder` encodes all nodes in three messages, in the same order:

    plain      for each node: names, texts, notes, frames, and the indices of the nodes that it refers to. Then the printed
               traceback, and source lines that are in no file. All are builtin values, encoded by marshal.
    details    for each node: `PickledParts`, the pickles from which decoder.py can rebuild it. None if it cannot be rebuilt.
    locals     for each node: the texts of its frames' local variables, with debug="locals" (local_variables.py).

The message `plain` is sent first. To make `plain`, the encoder calls `__str__` of each exception, and reads its `__notes__`.
No other code of the exception's class runs. If `__str__` or `__notes__` raises an exception, the encoder catches the
exception. For an AttributeError, Python's module `traceback` also calls `dir()` on the object that lacks the attribute,
to suggest a similar name (since Python 3.12).

To make `details`, the encoder pickles and rebuilds each exception, and so runs code of the exception's class, such as
`__reduce__`. If this code crashes or hangs, `plain` has already been sent, so the watcher knows where and why the rank
failed.

To make `locals`, the encoder calls `repr` of the local variables' values. A `__repr__` of a user's class can hang, so the
message `locals` is sent last.

If an attribute of an exception cannot be pickled, only this attribute is left out. If an argument of an exception cannot be
pickled, the argument's `repr` is pickled instead.
"""

import marshal
import pickle
from collections.abc import Callable, Iterator
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.exceptions.decoder import (
    ExceptionNode,
    PickledParts,
    get_builtin_attribute,
    has_same_text,
    is_builtin_class,
    rebuild_from_pickles,
)
from mpwatch.wire.exceptions.tracebacks import get_file, read_frames
from mpwatch.wire.pickling import return_values

MAX_NODES = 2000  # causes, contexts and group members together; further nodes are left out
MAX_TEXT = 1 << 20  # characters of one text; a longer text is cut
# These attributes are not pickled one by one, because the message "plain" has them or the exception is rebuilt with them.
ENCODED_ATTRIBUTES = {
    "__cause__",
    "__context__",
    "__traceback__",
    "__suppress_context__",
    "__class__",
    "__dict__",
    "__notes__",
    "args",
}
ENCODED_GROUP_ATTRIBUTES = {"exceptions", "message"}


class ExceptionEncoder:
    """Encodes one exception and all exceptions that it refers to, such as its cause.

    For each exception, the list `nodes` has one dictionary, which contains only builtin values. The exceptions are in
    breadth-first order.
    """

    def __init__(self, error: BaseException) -> None:
        found: dict[int, BaseException] = {}
        waiting = [error]
        while waiting and len(found) < MAX_NODES:
            exception = waiting.pop(0)
            if id(exception) not in found:
                found[id(exception)] = exception
                waiting += _get_neighbours(exception)
        self._errors = list(found.values())
        index = {key: number for number, key in enumerate(found)}
        self.nodes = [_encode_node(exception, index) for exception in self._errors]

    def plain(self) -> bytes:
        """Encode the message "plain"."""
        files = {get_file(frame) for node in self.nodes for frame in node["frames"]}
        sources = source_lines.collect_for_files(files)
        return marshal.dumps({"nodes": self.nodes, "traceback": _format_traceback(self._errors[0]), "sources": sources})

    def details(self) -> bytes:
        """Encode the message "details"."""
        parts = [_pickle_parts(error, node) for error, node in zip(self._errors, self.nodes, strict=True)]
        return pickle.dumps(parts, protocol=5)

    def locals(self) -> bytes:
        """Encode the message "locals"."""
        from mpwatch.wire.exceptions.local_variables import format_local_variables

        return marshal.dumps(format_local_variables(get_builtin_attribute(error, "__traceback__") for error in self._errors))


def _get_neighbours(error: BaseException) -> list[BaseException]:
    neighbours = [
        get_builtin_attribute(error, "__cause__"),
        get_builtin_attribute(error, "__context__"),
        *_get_members(error),
    ]
    return [neighbour for neighbour in neighbours if neighbour is not None]


def _is_group(error: BaseException) -> bool:
    return issubclass(type(error), BaseExceptionGroup)  # isinstance() would ask the object, which can override the answer


def _get_members(error: BaseException) -> tuple[BaseException, ...]:
    members: tuple[BaseException, ...] = ()
    if _is_group(error):
        members = BaseExceptionGroup.__dict__["exceptions"].__get__(error)
    return members


def _encode_node(error: BaseException, index: dict[int, int]) -> ExceptionNode:
    cls = type(error)
    is_group = _is_group(error)
    return {
        "name": _get_class_name(cls, "__name__"),
        "qualname": _get_class_name(cls, "__qualname__"),
        "module": _get_plain_text(lambda: cls.__module__),
        "bases": _find_builtin_bases(cls),
        "text": _get_text(error),
        "message": _get_plain_text(lambda: BaseExceptionGroup.__dict__["message"].__get__(error)) if is_group else "",
        "notes": _get_notes(error),
        "frames": read_frames(get_builtin_attribute(error, "__traceback__")),
        "cause": index.get(id(get_builtin_attribute(error, "__cause__"))),
        "context": index.get(id(get_builtin_attribute(error, "__context__"))),
        "suppress": get_builtin_attribute(error, "__suppress_context__"),
        "members": [index[id(member)] for member in _get_members(error) if id(member) in index],
    }


def _get_class_name(cls: type, name: str) -> str:
    text: str = type.__dict__[name].__get__(cls)  # a metaclass can override the attribute
    return str.__str__(text)


def _find_builtin_bases(cls: type) -> list[str]:
    """Return the names of the builtin exception classes from which `cls` is derived.

    Leave out a class if another class in the list is derived from it. For example, for a subclass of KeyError, return
    `["KeyError"]`, and not `["KeyError", "LookupError", "Exception"]`.
    """
    found: list[type] = []
    for base in cls.__mro__:
        is_ancestor = is_builtin_class(base) and issubclass(base, BaseException)
        if is_ancestor and not any(issubclass(other, base) for other in found):
            found.append(base)
    return [base.__name__ for base in found]


def _pickle_parts(error: BaseException, node: ExceptionNode) -> PickledParts | None:
    """Return the pickles from which this exception can be rebuilt, or None if it cannot be rebuilt."""
    try:
        members = list(_get_members(error))
        attributes = {
            name: data for name, value in _iterate_attributes(error) if (data := _try_pickle_and_load(value)) is not None
        }
        if not members:
            exact = _pickle_whole(error, node, attributes)
            if exact is not None:
                return exact
        args = get_builtin_attribute(error, "args") if not members else ()
        parts = {
            "exact": None,
            "class": _try_pickle_and_load(type(error)),
            "args": [_try_pickle_and_load(arg) or return_values.dumps(_get_repr(arg)) for arg in args],
            "attributes": attributes,
        }
        return parts if parts["class"] is not None and _can_be_rebuilt(error, node, parts, members) else None
    except BaseException:  # noqa: BLE001  a class that overrides attributes of every exception may raise anything
        return None


def _pickle_whole(error: BaseException, node: ExceptionNode, attributes: dict[str, bytes]) -> PickledParts | None:
    """Pickle the whole exception, and pickle separately each attribute that the first pickle does not restore.

    The default `__reduce__` of an exception, for example, does not pickle slots. Return None if the exception cannot be
    rebuilt from these pickles.
    """
    data = _try_pickle(error)
    if data is None:
        return None
    bare = {"exact": data, "attributes": {}}
    try:
        rebuilt = rebuild_from_pickles(node, bare, [])
        lost = {name: kept for name, kept in attributes.items() if _try_pickle(getattr(rebuilt, name, _missing)) != kept}
    except BaseException:  # noqa: BLE001  the exception's class may raise anything
        return None
    parts = {**bare, "attributes": lost}
    return parts if _can_be_rebuilt(error, node, parts, []) else None


def _can_be_rebuilt(error: BaseException, node: ExceptionNode, parts: PickledParts, members: list[BaseException]) -> bool:
    try:
        rebuilt = rebuild_from_pickles(node, parts, members)
    except BaseException:  # noqa: BLE001  the exception's class may raise anything
        return False
    if type(rebuilt) is not type(error):
        return False
    if has_same_text(_get_text(rebuilt), node["text"]):
        return True
    # If an argument of the exception is a set, the order in which it is printed may differ.
    has_default_text = type(error).__str__ is BaseException.__str__
    return has_default_text and len(get_builtin_attribute(rebuilt, "args")) == len(get_builtin_attribute(error, "args"))


def _missing() -> None:
    """Do nothing. `_pickle_whole` uses this function as the value of an attribute that the rebuilt exception lacks."""


def _try_pickle(value: Any) -> bytes | None:
    try:
        return return_values.dumps(value)
    except BaseException:  # noqa: BLE001  a __reduce__ can do anything, even sys.exit()
        return None


def _try_pickle_and_load(value: Any) -> bytes | None:
    """Return a pickle of the value, or None if the value cannot be pickled or the pickle cannot be loaded."""
    data = _try_pickle(value)
    if data is not None:
        try:
            return_values.loads(data)
        except BaseException:  # noqa: BLE001  the value's class may raise anything
            return None
    return data


def _get_plain_text(read: Callable[[], Any]) -> str:
    """Return the text that `read()` returns, as a plain `str` of at most MAX_TEXT characters.

    The module marshal refuses subclasses of `str`.
    """
    try:
        text = read()
        return str.__str__(text)[:MAX_TEXT] if isinstance(text, str) else ""
    except BaseException:  # noqa: BLE001
        return ""


def _get_text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))[:MAX_TEXT]
    except BaseException as error_in_str:  # noqa: BLE001
        return f"<its __str__ raised {type(error_in_str).__name__}>"


def _get_repr(value: Any) -> str:
    try:
        return str.__str__(repr(value))[:MAX_TEXT]
    except BaseException:  # noqa: BLE001
        return f"<{type(value).__qualname__}>"


def _get_notes(error: BaseException) -> list[str]:
    try:
        notes = getattr(error, "__notes__", ())
        return [str.__str__(note)[:MAX_TEXT] for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    except BaseException:  # noqa: BLE001
        return []


def _iterate_attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the attributes in the exception's `__dict__` and in its slots.

    `OSError.filename`, for example, is a slot of a builtin exception.
    """
    encoded = ENCODED_ATTRIBUTES | ENCODED_GROUP_ATTRIBUTES if _is_group(error) else ENCODED_ATTRIBUTES
    yield from ((name, value) for name, value in get_builtin_attribute(error, "__dict__").items() if name not in encoded)
    for base in type(error).__mro__:
        for name, descriptor in vars(base).items():
            if isinstance(descriptor, MemberDescriptorType | GetSetDescriptorType) and name not in encoded:
                try:
                    if (value := getattr(error, name)) is not None:  # OSError distinguishes an unset filename2 from None
                        yield name, value
                except BaseException:  # noqa: BLE001, S112  a slot without a value
                    continue


def _format_traceback(error: BaseException) -> str:
    try:
        import traceback

        text = "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001  a __str__ or a __notes__ may raise anything, and the import may fail by now
        return ""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n[...]\n{text[-MAX_TEXT // 2 :]}"
