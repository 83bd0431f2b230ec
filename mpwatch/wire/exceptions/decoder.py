"""Rebuilds an exception that encoder.py has encoded, with user code of its classes only where a function says so.

An exception, its causes, contexts and group members are the nodes of a graph. Each becomes an object of its own class if its
pickle can be loaded. Otherwise it becomes a stand-in, with the name, the builtin base classes and the text of the original:
`except ValueError` also catches the stand-in of a ValueError.

`read_cause_chain`, `read_summary` and `read_traceback_text` run no user code.
"""

from __future__ import annotations

import builtins
import marshal
from collections.abc import Sequence

from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.exceptions.tracebacks import build_traceback
from mpwatch.wire.pickling import return_values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ExceptionNode = dict[str, "Any"]  # one exception in the message "plain"; for its keys see `_encode_node` in encoder.py


# What user code, such as an observer, may raise in the caller's thread without ending the run. All else ends it: a
# KeyboardInterrupt, or an exception of a signal handler of the program.
USER_ERRORS = (Exception, SystemExit, GeneratorExit)


def add_note(error: BaseException, note: str) -> None:
    """Also to a frozen dataclass."""
    notes = getattr(error, "__notes__", None)
    BaseException.__setattr__(error, "__notes__", [*(notes if isinstance(notes, list) else ()), note])


def decode_exception(plain: bytes, details: bytes = b"", local_variables: bytes = b"") -> BaseException:
    """Rebuild an exception from the messages of `ExceptionEncoder`. Without `details`, the result is a stand-in. This runs
    user code, and ignores its exceptions, except KeyboardInterrupt.
    """
    content = marshal.loads(plain)
    source_lines.add_to_linecache(content["sources"])
    if local_variables:
        from mpwatch.wire.exceptions.local_variables import LocalText

        for node, texts in zip(content["nodes"], marshal.loads(local_variables), strict=True):
            for number, variables in texts.items():
                node["frames"][number]["locals"] = {name: LocalText(text) for name, text in variables.items()}
    return build_graph(content["nodes"], marshal.loads(details) if details else ())


def build_graph(nodes: list[ExceptionNode], pickles: Sequence[bytes | None] = ()) -> BaseException:
    """Build all exceptions of a graph, and return the exception of the first node. Runs user code only for pickles."""
    from graphlib import TopologicalSorter

    built: dict[int, BaseException] = {}
    # the constructor of a group needs its members
    for number in TopologicalSorter({number: node["members"] for number, node in enumerate(nodes)}).static_order():
        members = [built[member] for member in nodes[number]["members"]]
        built[number] = _build_exception(nodes[number], pickles[number] if pickles else None, members)
    for number, error in built.items():
        _set_references(error, nodes[number], built)
    return built[0]


def _build_exception(node: ExceptionNode, data: bytes | None, members: list[BaseException]) -> BaseException:
    if data is not None:
        try:
            return load_exception(data, node["message"], members)
        except USER_ERRORS:
            pass  # it could be loaded in the rank, but the classes here may differ
    return _build_stand_in(node, members)


def load_exception(data: bytes, message: str, members: list[BaseException]) -> BaseException:
    """Load the pickle of one exception (see `_pickle` in encoder.py). Raises what the code of its class raises."""
    error = return_values.loads(data)
    if type(error) is tuple:
        cls, args, attributes = error
        base = find_builtin_base(cls)
        args = (message, members) if members else args
        error = base.__new__(cls, *args)
        base.__init__(error, *args)  # not that of the class, whose arguments are not known
        for name, value in attributes.items():
            BaseException.__setattr__(error, name, value)  # the class may forbid it
    if not issubclass(type(error), BaseException):
        raise TypeError(f"its pickle contains {error!r}")
    loaded: BaseException = error
    return loaded


def is_builtin_class(cls: type) -> bool:
    """Return whether a class is builtin, which `cls.__module__` cannot tell: that of pytest's Skipped is "builtins"."""
    return getattr(builtins, cls.__name__, None) is cls


def find_builtin_base(cls: Any) -> Any:
    """Return the builtin class that determines the memory layout of this class."""
    while not is_builtin_class(cls):
        cls = cls.__base__
    return cls


def _build_stand_in(node: ExceptionNode, members: list[BaseException]) -> BaseException:
    text = node["text"]
    names = {"__module__": node["module"], "__qualname__": node["qualname"], "__str__": lambda _: text}
    bases = tuple(getattr(builtins, name) for name in node["bases"])
    if members:
        group: BaseException = type(node["name"], bases, names)(node["message"], members)
        return group
    if any(issubclass(base, BaseExceptionGroup) for base in bases):  # its members were left out, see MAX_NODES
        bases = (Exception if issubclass(bases[0], Exception) else BaseException,)
    cls: Any = type(node["name"], bases, names)
    # not cls.__new__: of the bases KeyError and OSError, it would be that of KeyError, which makes no OSError
    error: BaseException = find_builtin_base(cls).__new__(cls)
    error.args = (text,)
    if isinstance(error, SyntaxError):
        error.msg = text  # a traceback shows `msg`, not __str__()
    return error


def _set_references(error: BaseException, node: ExceptionNode, built: dict[int, BaseException]) -> None:
    """With BaseException.__setattr__, since a frozen dataclass has another."""
    BaseException.__setattr__(error, "__cause__", built.get(node["cause"]))
    BaseException.__setattr__(error, "__context__", built.get(node["context"]))
    BaseException.__setattr__(error, "__suppress_context__", node["suppress"])
    BaseException.__setattr__(error, "__traceback__", build_traceback(node["frames"]))
    if node["notes"]:
        BaseException.__setattr__(error, "__notes__", node["notes"])


def read_cause_chain(plain: bytes) -> list[ExceptionNode]:
    nodes: list[ExceptionNode] = marshal.loads(plain)["nodes"]
    chain: list[ExceptionNode] = []
    number: int | None = 0
    while number is not None and len(chain) < len(nodes):
        chain.append(nodes[number])
        number = nodes[number]["cause"]
    return chain


def read_summary(plain: bytes) -> str:
    first: ExceptionNode = marshal.loads(plain)["nodes"][0]
    return f"{first['qualname']}: {first['text']}" if first["text"].strip() else str(first["qualname"])


def read_traceback_text(plain: bytes) -> str:
    return str(marshal.loads(plain)["traceback"])
