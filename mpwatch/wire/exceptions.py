"""An exception over the wire: type, arguments, attributes, cause, context, notes, members and frames.

An exception is a graph, and a single part of it that cannot be pickled must not take the rest along. So the rank
(telling.py) walks the graph into a flat list of links that point at one another by index, and sends it twice:

    plain      names, texts, notes, frames, the shape of the graph: builtin values that harm nobody
    details    for each link what of it can be pickled, after `rebuild` has been tried with it, there and then

The watcher first knows that, where and why the rank has failed, and only then does the rank run what the exceptions'
classes define, which may raise, exit, crash or never end. `decode` (in the watcher) makes of each link the best it can:

    exact      the exception as it pickles itself
    rebuilt    its class, and those of its arguments and attributes that survive
    stand-in   a class of the same name, derived from its nearest builtin base, with the same text

Imports nothing of mpwatch but values.py and sources.py.
"""

import builtins
import pickle
import re
from types import TracebackType
from typing import Any

from . import sources, values

__all__ = ["Link", "Outline", "Part", "decode", "is_same_text", "outline", "rebuild", "text_of"]

Link = dict[str, Any]  # what is told of one exception; see telling.py
Part = dict[str, Any]  # its pickles
ADDRESS = re.compile(r"0x[0-9a-f]+")


def decode(told: bytes, details: bytes = b"") -> BaseException:
    """The exception that was told. Whatever its parts do when they are rebuilt, it comes back somehow."""
    plain = pickle.loads(told)
    sources.remember(plain["sources"])
    links: list[Link] = plain["links"]
    parts: list[Part | None] = pickle.loads(details) if details else [None] * len(links)
    made: dict[int, BaseException] = {}
    for number in _members_first(links):
        members = [made[member] for member in links[number]["members"] if member in made]
        made[number] = _make(links[number], parts[number], members)
    for number, error in made.items():
        _connect(error, links[number], made)
    return made[0]


def _members_first(links: list[Link]) -> list[int]:
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


def _make(link: Link, part: Part | None, members: list[BaseException]) -> BaseException:
    if part is not None:
        try:
            return rebuild(link, part, members)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001, S110  it worked in the rank, and the classes here may be others
            pass
    return _stand_in(link, members)


def rebuild(link: Link, part: Part, members: list[BaseException]) -> BaseException:
    """The exception of its own class, exact or from its parts. Runs what its class defines; raises whatever that raises."""
    if part["exact"] is not None:
        error = values.loads(part["exact"])
        if not isinstance(error, BaseException):
            raise TypeError(f"its pickle makes {error!r}")
    else:
        # without __init__, which may want arguments that nobody knows any more
        args = (link["message"], members) if members else tuple(values.loads(arg) for arg in part["args"])
        error = _new(values.loads(part["class"]), args)
    _set_attributes(error, part)  # also of an exact one: pickle knows nothing of slots, and calls __init__ with args
    return error


def _set_attributes(error: BaseException, part: Part) -> None:
    for name, data in part["attributes"].items():
        try:
            if not hasattr(error, name) or values.dumps(getattr(error, name)) != data:
                setattr(error, name, values.loads(data))
        except Exception:  # noqa: BLE001, S112  a read-only slot, or a value that does not come back
            continue


def is_same_text(one: str, other: str) -> bool:
    """But for addresses, which reprs of functions and objects have in them."""
    return ADDRESS.sub("", one) == ADDRESS.sub("", other)


def _new(cls: Any, args: tuple[Any, ...]) -> BaseException:
    try:
        error: object = cls.__new__(cls, *args)
    except Exception:  # noqa: BLE001  a __new__ of its own: go round it, to that of the nearest builtin class
        base = next(base for base in cls.__mro__ if base.__module__ == "builtins")
        error = base.__new__(cls, *args)
    if not isinstance(error, BaseException):
        raise TypeError(f"{cls!r} makes no exceptions")
    return error


def _stand_in(link: Link, members: list[BaseException]) -> BaseException:
    """A class of the same name and text: caught by `except` of the builtin classes that it was derived from."""
    text = link["text"]
    names = {"__module__": link["module"], "__qualname__": link["qualname"], "__str__": lambda _: text}
    base: type[BaseException] = getattr(builtins, link["base"])
    cls: Any = type(link["name"], (base,), names)
    if members:
        group: BaseException = cls.__new__(cls, link["message"], members)
        return group
    if issubclass(base, BaseExceptionGroup):  # its members were cut off
        cls = type(link["name"], (BaseException if base is BaseExceptionGroup else Exception,), names)
    error: BaseException = cls.__new__(cls)
    error.args = (text,)
    return error


def _connect(error: BaseException, link: Link, made: dict[int, BaseException]) -> None:
    state = {
        "__cause__": made.get(link["cause"]),
        "__context__": made.get(link["context"]),
        "__suppress_context__": link["suppress"],
        "__traceback__": _traceback(link["frames"]),
        **({"__notes__": link["notes"]} if link["notes"] else {}),
    }
    for name, value in state.items():
        BaseException.__setattr__(error, name, value)  # not the class's own, which may forbid it (a frozen dataclass)


def _traceback(frames: list[tuple[str, str, int, str]]) -> TracebackType | None:
    """Real frames with nothing in them, made by tblib one at a time: it recurses over a whole traceback."""
    from tblib import Traceback

    trace = None
    for filename, name, line, module in reversed(frames):
        about = {
            "tb_frame": {
                "f_globals": {"__name__": module, "__file__": filename},
                "f_code": {"co_filename": filename, "co_name": name},
                "f_lineno": line,
            },
            "tb_lineno": line,
            "tb_next": None,
        }
        frame = Traceback.from_dict(about).as_traceback().tb_frame
        trace = TracebackType(trace, frame, -1, line)  # -1: the carets of the made-up code would point anywhere
    return trace


class Outline:
    """A link as it can be told without rebuilding anything."""

    __slots__ = ("name", "raised_in", "text")

    def __init__(self, link: Link) -> None:
        self.name: str = link["name"]
        self.text: str = link["text"]
        self.raised_in: str = link["frames"][-1][0] if link["frames"] else ""


def outline(told: bytes) -> list[Outline]:
    """The exception and what it was raised from, `cause` after `cause`."""
    links: list[Link] = pickle.loads(told)["links"]
    chain: list[Outline] = []
    number: int | None = 0
    while number is not None and len(chain) < len(links):
        chain.append(Outline(links[number]))
        number = links[number]["cause"]
    return chain


def text_of(told: bytes) -> str:
    """The traceback as the rank would have printed it."""
    text: str = pickle.loads(told)["traceback"]
    return text
