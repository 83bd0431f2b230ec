"""An exception over the wire: type, arguments, attributes, cause, context, notes, members and frames.

An exception is a graph, and a single part of it that cannot be pickled must not take the rest along. So the rank
(telling.py) walks the graph into a flat list of links that point at one another by index, and sends it twice:

    plain      names, texts, notes, frames, the shape of the graph: marshalled, so nothing but plain builtin values
    details    for each link what of it can be pickled, after `rebuild` has been tried with it, there and then

The watcher first knows that, where and why the rank has failed, and only then does the rank run what the exceptions'
classes define, which may raise, exit, crash or never end. `decode` (in the watcher) makes of each link the best it can:

    exact      the exception as it pickles itself
    rebuilt    its class, and those of its arguments and attributes that survive
    stand-in   a class of the same name, derived from the same builtin classes, with the same text

Imports nothing of mpwatch but values.py, sources.py and frames.py.
"""

import builtins
import marshal
import pickle
import re
from collections.abc import Sequence
from typing import Any

from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.exceptions.tracebacks import traceback_of
from mpwatch.wire.pickling import return_values

ExceptionNode = dict[str, Any]  # what is told of one exception; see telling.py
PickledParts = dict[str, Any]  # its pickles
ADDRESS = re.compile(r"0x[0-9a-f]+")


def own(error: BaseException, name: str) -> Any:
    """What every exception has (`__cause__` and the like), whatever its class says instead."""
    return BaseException.__dict__[name].__get__(error)


def set_own(error: BaseException, name: str, value: object) -> None:
    """Set it, whatever its class says to that."""
    BaseException.__dict__[name].__set__(error, value)


def annotate(error: BaseException, note: str) -> None:
    """As its `add_note`, which a class may forbid (a frozen dataclass)."""
    notes = getattr(error, "__notes__", None)
    BaseException.__setattr__(error, "__notes__", [*(notes if isinstance(notes, list) else ()), note])


def decode(told: bytes, details: bytes = b"") -> BaseException:
    """The exception that was told. Whatever its parts do when they are rebuilt, it comes back somehow."""
    plain = marshal.loads(told)
    source_lines.remember(plain["sources"])
    return assemble(plain["links"], pickle.loads(details) if details else [])


def assemble(links: list[ExceptionNode], parts: Sequence[PickledParts | None] = ()) -> BaseException:
    """The first of these, and what hangs on it: from its parts where there are any, else as a stand-in."""
    made: dict[int, BaseException] = {}
    for number in _members_first(links):
        members = [made[member] for member in links[number]["members"] if member in made]
        made[number] = _make(links[number], parts[number] if parts else None, members)
    for number, error in made.items():
        _connect(error, links[number], made)
    return made[0]


def _members_first(links: list[ExceptionNode]) -> list[int]:
    """The links in an order in which a group comes after its members: it is made of them, and cannot hold itself."""
    order: list[int] = []
    waiting = [(number, False) for number in range(len(links))]
    done = set()
    while waiting:
        number, ready = waiting.pop()
        if number in done:
            continue
        if ready:
            done.add(number)
            order.append(number)
        else:
            waiting.append((number, True))
            waiting += [(member, False) for member in links[number]["members"]]
    return order


def _make(link: ExceptionNode, part: PickledParts | None, members: list[BaseException]) -> BaseException:
    if part is not None:
        try:
            return rebuild(link, part, members)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001, S110  it worked in the rank, and the classes here may be others
            pass
    return _stand_in(link, members)


def rebuild(link: ExceptionNode, part: PickledParts, members: list[BaseException]) -> BaseException:
    """The exception of its own class, exact or from its parts. Runs what its class defines; raises whatever that raises."""
    if part["exact"] is not None:
        error = return_values.loads(part["exact"])
        if not isinstance(error, BaseException):
            raise TypeError(f"its pickle makes {error!r}")
    else:
        # without __init__, which may want arguments that nobody knows any more
        args = (link["message"], members) if members else tuple(return_values.loads(arg) for arg in part["args"])
        error = _new(return_values.loads(part["class"]), args)
    for name, data in part["attributes"].items():
        try:
            setattr(error, name, return_values.loads(data))
        except Exception:  # noqa: BLE001, S112  a read-only slot
            continue
    return error


def is_builtin(cls: type) -> bool:
    """Whether Python has it; a class may say so, as pytest's Skipped does, to be shown without its module."""
    return getattr(builtins, cls.__name__, None) is cls


def is_same_text(one: str, other: str) -> bool:
    """But for addresses, which reprs of functions and objects have in them."""
    return ADDRESS.sub("", one) == ADDRESS.sub("", other)


def _new(cls: Any, args: tuple[Any, ...]) -> BaseException:
    try:
        error: object = cls.__new__(cls, *args)
    except Exception:  # noqa: BLE001  a __new__ of its own: go round it, to that of the nearest builtin class
        base = next(base for base in cls.__mro__ if is_builtin(base))
        error = base.__new__(cls, *args)
    if not isinstance(error, BaseException):
        raise TypeError(f"{cls!r} makes no exceptions")
    return error


def _stand_in(link: ExceptionNode, members: list[BaseException]) -> BaseException:
    """A class of the same name and text: caught by `except` of the builtin classes that it was derived from."""
    text = link["text"]
    names = {"__module__": link["module"], "__qualname__": link["qualname"], "__str__": lambda _: text}
    bases = tuple(getattr(builtins, name) for name in link["bases"])
    if members:
        group: BaseException = type(link["name"], bases, names)(link["message"], members)
        return group
    if any(issubclass(base, BaseExceptionGroup) for base in bases):  # its members were cut off
        bases = (Exception if issubclass(bases[0], Exception) else BaseException,)
    cls: Any = type(link["name"], bases, names)
    error: BaseException = cls.__new__(cls)
    error.args = (text,)
    if isinstance(error, SyntaxError):
        error.msg = text  # who prints a traceback takes this, and not what __str__ says
    return error


def _connect(error: BaseException, link: ExceptionNode, made: dict[int, BaseException]) -> None:
    set_own(error, "__cause__", made.get(link["cause"]))
    set_own(error, "__context__", made.get(link["context"]))
    set_own(error, "__suppress_context__", link["suppress"])
    set_own(error, "__traceback__", traceback_of(link["frames"]))
    if link["notes"]:
        own(error, "__dict__")["__notes__"] = link["notes"]


class ExceptionHeader:
    """A link as it can be told without rebuilding anything."""

    __slots__ = ("name", "raised_in", "text")

    def __init__(self, link: ExceptionNode) -> None:
        self.name: str = link["name"]
        self.text: str = link["text"]
        self.raised_in: str = link["frames"][-1][0] if link["frames"] else ""


def outline(told: bytes) -> list[ExceptionHeader]:
    """The exception and what it was raised from, `cause` after `cause`."""
    links: list[ExceptionNode] = marshal.loads(told)["links"]
    chain: list[ExceptionHeader] = []
    number: int | None = 0
    while number is not None and len(chain) < len(links):
        chain.append(ExceptionHeader(links[number]))
        number = links[number]["cause"]
    return chain


def summary_of(told: bytes) -> str:
    """The exception's type and text."""
    first: ExceptionNode = marshal.loads(told)["links"][0]
    return f"{first['qualname']}: {first['text']}" if first["text"].strip() else str(first["qualname"])


def text_of(told: bytes) -> str:
    """The traceback as the rank would have printed it."""
    text: str = marshal.loads(told)["traceback"]
    return text
