"""Encodes an exception for the watcher, in a rank or in a process that pickles a ProcessFailure.

An exception, its causes, contexts and group members are the nodes of a graph. Three messages describe all nodes, in the same
order. They are sent one after the other, so that user code that crashes or hangs can cost only what follows it:

    plain     names, texts, notes, frames and the indices of other nodes; the printed traceback; source lines that are in no
              file. Of the exceptions' code, only `__str__` and what reads `__notes__` runs; what they raise is caught.
    details   one pickle for each node, or None if it cannot be pickled, or not be loaded again.
    locals    with debug="locals", the texts of the frames' variables, which take a `repr` of each.
"""

from __future__ import annotations

import copyreg
import marshal
import traceback

from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.exceptions.decoder import (
    ExceptionNode,
    find_builtin_base,
    is_builtin_class,
    load_exception,
)
from mpwatch.wire.exceptions.tracebacks import read_frames
from mpwatch.wire.pickling import return_values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_get_slot_names: Any = vars(copyreg)["_slotnames"]
MAX_NODES = 2000  # causes, contexts and group members together; further nodes are left out
MAX_TEXT = 1 << 20  # characters of one text; a longer text is cut


class ExceptionEncoder:
    """Encodes an exception and all exceptions that it refers to. `nodes` has one dict for each, in breadth-first order."""

    def __init__(self, error: BaseException) -> None:
        found: dict[int, BaseException] = {}
        waiting = [error]
        while waiting and len(found) < MAX_NODES:
            exception = waiting.pop(0)
            if id(exception) not in found:
                found[id(exception)] = exception
                references = exception.__cause__, exception.__context__, *_get_members(exception)
                waiting += [other for other in references if other is not None]
        self._errors = list(found.values())
        index = {key: number for number, key in enumerate(found)}
        self.nodes = [_encode_node(exception, index) for exception in self._errors]

    def plain(self) -> bytes:
        sources = source_lines.collect({frame["file"] for node in self.nodes for frame in node["frames"]})
        return marshal.dumps({"nodes": self.nodes, "traceback": _format_traceback(self._errors[0]), "sources": sources})

    def details(self) -> bytes:
        return marshal.dumps([_pickle(error, node) for error, node in zip(self._errors, self.nodes, strict=True)])

    def locals(self) -> bytes:
        from mpwatch.wire.exceptions.local_variables import format_local_variables

        return marshal.dumps(format_local_variables(error.__traceback__ for error in self._errors))


def _get_members(error: BaseException) -> tuple[BaseException, ...]:
    return error.exceptions if isinstance(error, BaseExceptionGroup) else ()


def _encode_node(error: BaseException, index: dict[int, int]) -> ExceptionNode:
    cls = type(error)
    notes = vars(error).get("__notes__")  # `__getattr__` of the class may raise anything
    return {
        "name": cls.__name__,
        "qualname": cls.__qualname__,
        "module": cls.__module__,
        "bases": _find_builtin_bases(cls),
        "text": _get_text(error),
        "message": error.message[:MAX_TEXT] if isinstance(error, BaseExceptionGroup) else "",
        "notes": [note[:MAX_TEXT] for note in notes if isinstance(note, str)] if isinstance(notes, list) else [],
        "frames": read_frames(error.__traceback__),
        "cause": index.get(id(error.__cause__)),
        "context": index.get(id(error.__context__)),
        "suppress": error.__suppress_context__,
        "members": [index[id(member)] for member in _get_members(error) if id(member) in index],
    }


def _find_builtin_bases(cls: type) -> list[str]:
    """Return `["KeyError"]` for a subclass of KeyError, and not `["KeyError", "LookupError", "Exception"]`."""
    found: list[type] = []
    for base in cls.__mro__:
        is_ancestor = is_builtin_class(base) and issubclass(base, BaseException)
        if is_ancestor and not any(issubclass(other, base) for other in found):
            found.append(base)
    return [base.__name__ for base in found]


def _pickle(error: BaseException, node: ExceptionNode) -> bytes | None:
    """Return None unless the exception can be pickled, and be loaded again as an object of the same class.

    A class that overrides `__reduce__` pickles itself. Otherwise the pickle has the class, the arguments of the builtin base
    and the attributes, because the `__init__` of many classes does not take `args`, with which plain pickle would call it.
    """
    cls, base = type(error), find_builtin_base(type(error))
    members = list(_get_members(error))
    try:
        if not members and (cls.__reduce__ is not base.__reduce__ or cls.__reduce_ex__ is not base.__reduce_ex__):
            data = return_values.dumps(error)
        else:
            _, args, attributes = (*base.__reduce__(error), {})[:3]
            slots = [*_get_slot_names(cls), *(["name"] if isinstance(error, NameError | AttributeError) else [])]
            attributes = {**attributes, **{name: getattr(error, name) for name in slots if hasattr(error, name)}}
            attributes.pop("__notes__", None)
            data = return_values.dumps((cls, () if members else args, attributes))
        return data if type(load_exception(data, node["message"], members)) is cls else None
    except BaseException:  # noqa: BLE001  user code, which may even exit
        return None


def _get_text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))[:MAX_TEXT]
    except BaseException as error_in_str:  # noqa: BLE001
        return f"<its __str__ raised {type(error_in_str).__name__}>"


def _format_traceback(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  of `__getattr__` of its class
        text = "".join([*traceback.format_tb(error.__traceback__), f"{type(error).__qualname__}: {_get_text(error)}\n"])
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n[...]\n{text[-MAX_TEXT // 2 :]}"
