"""An exception over the wire: type, arguments, attributes, cause, context, notes, members and frames.

An exception is a graph, and a single part of it that cannot be pickled must not take the rest along. So `encode` (in the
rank) walks the graph into a flat list of links that point at one another by index, and each link carries itself in
several ways, best first; `decode` (in the watcher) takes the first that works:

    exact      the exception as it pickles itself; tried out in the rank, where a failure does no harm
    rebuilt    its class, and those of its arguments and attributes that survive
    stand-in   a class of the same name, derived from its nearest builtin base, with the same text

Everything in a link but those pickles is a plain builtin value. Imports nothing of mpwatch but values.py.
"""

import builtins
import pickle
import re
from collections.abc import Iterator
from types import GetSetDescriptorType, MemberDescriptorType, TracebackType
from typing import Any

from . import values

__all__ = ["Outline", "decode", "encode", "outline", "text_of"]

Link = dict[str, Any]
MAX_LINKS = 2000  # of causes, contexts and group members together; a graph beyond that is cut off
ADDRESS = re.compile(r"0x[0-9a-f]+")
OWN_SLOTS = {"__cause__", "__context__", "__traceback__", "__suppress_context__", "__dict__", "args"}


def encode(error: BaseException) -> bytes:
    """Everything that can be sent of an exception and what hangs on it. Runs what the exceptions' classes define."""
    found: dict[int, BaseException] = {}
    waiting = [error]
    while waiting and len(found) < MAX_LINKS:
        met = waiting.pop(0)
        if id(met) not in found:
            found[id(met)] = met
            waiting += _neighbours(met)
    index = {key: number for number, key in enumerate(found)}
    links = [_encode_link(met, index) for met in found.values()]
    return pickle.dumps({"links": links, "traceback": _printed(error)}, protocol=5)


def decode(data: bytes) -> BaseException:
    """The exception that `encode` was given. Whatever its parts do when they are rebuilt, it comes back somehow."""
    links: list[Link] = pickle.loads(data)["links"]
    made: dict[int, BaseException] = {}
    for number in _members_first(links):
        members = [made[member] for member in links[number]["members"] if member in made]
        made[number] = _rebuild(links[number], members)
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


def _rebuild(link: Link, members: list[BaseException]) -> BaseException:
    for make in (_from_exact, _from_parts):
        try:
            error = make(link, members)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001, S112  a class's own code runs here: the next way is tried
            continue
        if error is not None:
            return error
    return _stand_in(link, members)


def _from_exact(link: Link, _: list[BaseException]) -> BaseException | None:
    if link["exact"] is None:
        return None
    error = values.loads(link["exact"])
    if not isinstance(error, BaseException):
        return None
    _set_attributes(error, link)  # pickle knows nothing of slots, and calls __init__ with whatever is in args
    return error


def _from_parts(link: Link, members: list[BaseException]) -> BaseException | None:
    """Without __init__, which may want arguments that nobody knows any more."""
    if link["class"] is None:
        return None
    cls = values.loads(link["class"])
    args = (link["message"], members) if members else tuple(values.loads(arg) for arg in link["args"])
    error = _new(cls, args)
    _set_attributes(error, link)
    return error if _is_same_text(_text(error), link["text"]) else None


def _set_attributes(error: BaseException, link: Link) -> None:
    for name, data in link["attributes"].items():
        try:
            if not hasattr(error, name) or _try_dumps(getattr(error, name)) != data:
                setattr(error, name, values.loads(data))
        except Exception:  # noqa: BLE001, S112  a read-only slot, or a value that does not come back
            continue


def _is_same_text(one: str, other: str) -> bool:
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
    """A link of an encoded exception as it can be told without rebuilding anything."""

    __slots__ = ("name", "raised_in", "text")

    def __init__(self, link: Link) -> None:
        self.name: str = link["name"]
        self.text: str = link["text"]
        self.raised_in: str = link["frames"][-1][0] if link["frames"] else ""


def outline(data: bytes) -> list[Outline]:
    """The exception and what it was raised from, `cause` after `cause`."""
    links: list[Link] = pickle.loads(data)["links"]
    chain: list[Outline] = []
    number: int | None = 0
    while number is not None and len(chain) < len(links):
        chain.append(Outline(links[number]))
        number = links[number]["cause"]
    return chain


def text_of(data: bytes) -> str:
    """The traceback as the rank would have printed it."""
    text: str = pickle.loads(data)["traceback"]
    return text


def _neighbours(error: BaseException) -> list[BaseException]:
    try:
        near = [e for e in (error.__cause__, error.__context__) if isinstance(e, BaseException)]
        return [*near, *(error.exceptions if isinstance(error, BaseExceptionGroup) else ())]
    except BaseException:  # noqa: BLE001  of a class that overrides what every exception has
        return []


def _encode_link(error: BaseException, index: dict[int, int]) -> Link:
    try:
        return _whole_link(error, index)
    except BaseException as broken:  # noqa: BLE001  of a class that overrides what every exception has
        bare = _whole_link(Exception(f"<{type(broken).__name__} was raised when it was taken apart>"), index)
        return {**bare, "name": type(error).__name__, "exact": None, "class": None}


def _whole_link(error: BaseException, index: dict[int, int]) -> Link:
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return {
        "name": type(error).__name__,
        "qualname": type(error).__qualname__,
        "module": type(error).__module__,
        "base": next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"),
        "text": _text(error),
        "message": str(error.message) if isinstance(error, BaseExceptionGroup) else "",
        "exact": _exact(error) if not members else None,
        "class": _try_dumps(type(error)),
        "args": [_try_dumps(arg) or _try_dumps(_repr(arg)) for arg in error.args] if not members else [],
        "attributes": {name: data for name, value in _attributes(error) if (data := _try_dumps(value))},
        "notes": _notes(error),
        "frames": _frames(error.__traceback__),
        "cause": index.get(id(error.__cause__)),
        "context": index.get(id(error.__context__)),
        "suppress": error.__suppress_context__,
        "members": [index[id(member)] for member in members if id(member) in index],
    }


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list | tuple) else []


def _exact(error: BaseException) -> bytes | None:
    """The exception as it pickles itself, if what comes out again is the same kind of thing with the same text."""
    data = _try_dumps(error)
    if data is None:
        return None
    try:
        again = values.loads(data)
    except BaseException:  # noqa: BLE001  its own code runs here, and may raise anything
        return None
    return data if type(again) is type(error) and _is_same_text(_text(again), _text(error)) else None


def _try_dumps(value: Any) -> bytes | None:
    try:
        return values.dumps(value)
    except BaseException:  # noqa: BLE001  whatever a class does in __reduce__, sys.exit() included: this part is left out
        return None


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
        frames.append(
            (code.co_filename, code.co_name, trace.tb_lineno or 0, module)
        )  # code that was generated may have no lines
        trace = trace.tb_next
    return frames
