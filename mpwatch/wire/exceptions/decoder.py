"""Decodes an exception that encoder.py has encoded. This module runs in the watcher.

In the rank, encoder.py uses this module to test whether an exception can be rebuilt from its pickles.

An exception, its causes and the members of an exception group are the nodes of a graph. `decode_exception` rebuilds each
node in the best way that works:

    exact      unpickle the exception as a whole
    rebuilt    unpickle its class, and the arguments and attributes that could be pickled; then create it from them
    stand-in   create a class of the same name, derived from the same builtin classes, with the same text

The functions `read_cause_chain`, `read_summary` and `read_traceback_text` run no user code. These functions rebuild no
exception, but read texts from the message "plain".
"""

import builtins
import marshal
import pickle
import re
from collections.abc import Sequence
from typing import Any

from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.exceptions.tracebacks import add_local_variables, build_traceback, get_file
from mpwatch.wire.pickling import return_values

ExceptionNode = dict[str, Any]  # one exception in the message "plain"; for its keys see `_encode_node` in encoder.py
PickledParts = dict[str, Any]  # the pickles of one exception; for its keys see `_pickle_parts` in encoder.py
MEMORY_ADDRESS = r"0x[0-9a-f]+"


# These exceptions end a run if they are raised while user code runs in the caller's thread. All others are errors of that
# code.
ENDS_RUN = (KeyboardInterrupt,)


def get_builtin_attribute(error: BaseException, name: str) -> Any:
    """Read an attribute that every exception has, such as `__cause__`, even if the exception's class overrides it."""
    return BaseException.__dict__[name].__get__(error)


def set_builtin_attribute(error: BaseException, name: str, value: object) -> None:
    """Set an attribute of BaseException, such as `__cause__`, even if the exception's class overrides this attribute."""
    BaseException.__dict__[name].__set__(error, value)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, even if the exception is a frozen dataclass."""
    notes = getattr(error, "__notes__", None)
    BaseException.__setattr__(error, "__notes__", [*(notes if isinstance(notes, list) else ()), note])


def decode_exception(plain: bytes, details: bytes = b"", local_variables: bytes = b"") -> BaseException:
    """Rebuild an exception from the three messages that encoder.py has made from it.

    This function runs user code, and ignores the exceptions of this code, except KeyboardInterrupt.

    Args:
        plain: the message "plain" of `ExceptionEncoder`.
        details: the message "details". If it is empty, a stand-in for the exception is returned.
        local_variables: the message "locals". If it is empty, the frames have no local variables.
    """
    content = marshal.loads(plain)
    source_lines.add_to_linecache(content["sources"])
    if local_variables:
        for node, texts in zip(content["nodes"], marshal.loads(local_variables), strict=True):
            add_local_variables(node["frames"], texts)
    return build_graph(content["nodes"], pickle.loads(details) if details else [])


def build_graph(nodes: list[ExceptionNode], parts: Sequence[PickledParts | None] = ()) -> BaseException:
    """Build all exceptions of a graph, and return the exception of the first node."""
    built: dict[int, BaseException] = {}
    for number in _order_members_first(nodes):
        members = [built[member] for member in nodes[number]["members"] if member in built]
        built[number] = _build_exception(nodes[number], parts[number] if parts else None, members)
    for number, error in built.items():
        _set_references(error, nodes[number], built)
    return built[0]


def _order_members_first(nodes: list[ExceptionNode]) -> list[int]:
    """Return the numbers of the nodes in the order in which the exceptions must be created.

    Put the members of an exception group before the group itself, because the group's constructor needs the members.
    """
    order: list[int] = []
    waiting = [(number, False) for number in range(len(nodes))]
    done = set()
    while waiting:
        number, has_members = waiting.pop()
        if number in done:
            continue
        if has_members:
            done.add(number)
            order.append(number)
        else:
            waiting.append((number, True))
            waiting += [(member, False) for member in nodes[number]["members"]]
    return order


def _build_exception(node: ExceptionNode, parts: PickledParts | None, members: list[BaseException]) -> BaseException:
    if parts is not None:
        try:
            return rebuild_from_pickles(node, parts, members)
        except ENDS_RUN:
            raise
        except BaseException:  # noqa: BLE001, S110
            pass  # rebuilding worked in the rank, but the classes here may differ
    return _build_stand_in(node, members)


def rebuild_from_pickles(node: ExceptionNode, parts: PickledParts, members: list[BaseException]) -> BaseException:
    """Create the exception from its pickles, as an object of its original class (not as a stand-in).

    Raises any exception that the code of the original class raises.
    """
    if parts["exact"] is not None:
        error = return_values.loads(parts["exact"])
        if not isinstance(error, BaseException):
            raise TypeError(f"its pickle contains {error!r}")
    else:
        # without __init__, whose arguments are not known
        args = (node["message"], members) if members else tuple(return_values.loads(arg) for arg in parts["args"])
        error = _construct(return_values.loads(parts["class"]), args)
    for name, data in parts["attributes"].items():
        try:
            setattr(error, name, return_values.loads(data))
        except Exception:  # noqa: BLE001, S112  a read-only slot
            continue
    return error


def is_builtin_class(cls: type) -> bool:
    """Return whether a class is builtin.

    `is_builtin_class` does not read `cls.__module__`, because `__module__` can be wrong. For example, pytest's class Skipped
    is not builtin, but its `__module__` is "builtins".
    """
    return getattr(builtins, cls.__name__, None) is cls


def has_same_text(one: str, other: str) -> bool:
    """Remove memory addresses such as `0x7f3a` from two texts, and return whether the two texts are then equal."""
    return re.sub(MEMORY_ADDRESS, "", one) == re.sub(MEMORY_ADDRESS, "", other)


def _construct(cls: Any, args: tuple[Any, ...]) -> BaseException:
    try:
        error: object = cls.__new__(cls, *args)
    except Exception:  # noqa: BLE001  the class's own __new__ raised, so call __new__ of the nearest builtin class
        base = next(base for base in cls.__mro__ if is_builtin_class(base))
        error = base.__new__(cls, *args)
    if not isinstance(error, BaseException):
        raise TypeError(f"{cls!r} does not create exceptions")
    return error


def _build_stand_in(node: ExceptionNode, members: list[BaseException]) -> BaseException:
    """Create a stand-in for an exception that cannot be rebuilt from its pickles.

    The stand-in has the text of the original exception. The class of the stand-in has the name of the original class, and is
    derived from the same builtin classes. For example, `except ValueError` also catches the stand-in of a ValueError.
    """
    text = node["text"]
    names = {"__module__": node["module"], "__qualname__": node["qualname"], "__str__": lambda _: text}
    bases = tuple(getattr(builtins, name) for name in node["bases"])
    if members:
        group: BaseException = type(node["name"], bases, names)(node["message"], members)
        return group
    if any(issubclass(base, BaseExceptionGroup) for base in bases):  # its members were left out, see MAX_NODES
        bases = (Exception if issubclass(bases[0], Exception) else BaseException,)
    cls: Any = type(node["name"], bases, names)
    error: BaseException = cls.__new__(cls)
    error.args = (text,)
    if isinstance(error, SyntaxError):
        error.msg = text  # a traceback shows `msg`, not __str__()
    return error


def _set_references(error: BaseException, node: ExceptionNode, built: dict[int, BaseException]) -> None:
    set_builtin_attribute(error, "__cause__", built.get(node["cause"]))
    set_builtin_attribute(error, "__context__", built.get(node["context"]))
    set_builtin_attribute(error, "__suppress_context__", node["suppress"])
    set_builtin_attribute(error, "__traceback__", build_traceback(node["frames"]))
    if node["notes"]:
        get_builtin_attribute(error, "__dict__")["__notes__"] = node["notes"]


class ExceptionHeader:
    """The name and text of one exception, and the file in which it was raised (empty if unknown)."""

    __slots__ = ("name", "raised_in", "text")

    def __init__(self, node: ExceptionNode) -> None:
        self.name: str = node["name"]
        self.text: str = node["text"]
        self.raised_in: str = get_file(node["frames"][-1]) if node["frames"] else ""


def read_cause_chain(plain: bytes) -> list[ExceptionHeader]:
    """Return a list of ExceptionHeaders: the first is for the exception, the second is for its cause, and so on."""
    nodes: list[ExceptionNode] = marshal.loads(plain)["nodes"]
    chain: list[ExceptionHeader] = []
    number: int | None = 0
    while number is not None and len(chain) < len(nodes):
        chain.append(ExceptionHeader(nodes[number]))
        number = nodes[number]["cause"]
    return chain


def read_summary(plain: bytes) -> str:
    """Return the exception's type and text."""
    first: ExceptionNode = marshal.loads(plain)["nodes"][0]
    return f"{first['qualname']}: {first['text']}" if first["text"].strip() else str(first["qualname"])


def read_traceback_text(plain: bytes) -> str:
    """Return the text of the traceback. If the rank could not make this text, make it from the names, texts and frames."""
    import traceback

    content = marshal.loads(plain)
    text: str = content["traceback"]
    return text or "".join(traceback.format_exception(build_graph(content["nodes"])))
