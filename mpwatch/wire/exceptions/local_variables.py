"""Converts the local variables in a traceback to text, for debug="locals". This module runs in the rank.

A daemon thread makes the texts, because `repr` runs code of the variable's class and can hang. The rank waits at most
LIMIT_SECONDS for the texts of all local variables. If the text of a variable is not ready in time, the rank sends the
constant STOPPED instead.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from reprlib import Repr
from types import FunctionType, ModuleType

from mpwatch.os_support.clock import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType, TracebackType
    from typing import Any

LIMIT_SECONDS = 1.0
OUTERMOST_FRAMES, INNERMOST_FRAMES = 20, 80  # of each traceback; the frames between them belong to a recursion
MAX_VARIABLES = 100  # of a frame
MAX_ITEMS = 20  # of a container
MAX_STRING = 500  # characters of a string, or bytes
MAX_TEXT = 2000  # characters of a variable
MAX_TOTAL = 1 << 20  # characters of all variables
LITERALS = (
    str,
    bytes,
    bytearray,
    dict,
    list,
    set,
    tuple,
)  # the text of such a value is a literal, without the name of the class
BRACKETS = {tuple: ("(", ")"), set: ("{", "}"), frozenset: ("{", "}")}
MISSING = "<missing>"
STOPPED = "<its text was not made in time>"
DEFINITIONS = (ModuleType, FunctionType, type)  # such values are left out of the frames of modules


class LocalText(str):
    """The value of a local variable as text.

    The `repr` of a LocalText adds no quotation marks to the text. So a debugger shows a list as `[1, 2]`, not as `'[1, 2]'`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str.__str__(self)


class BoundedRepr(Repr):
    """Makes texts of limited length from objects. Reads only the beginning of containers, strings and bytes.

    An object of a subclass of a container such as `list` is shown as `Name([...])`. A dataclass or a named tuple is shown
    with its fields, and any other object by its own `repr`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxother = MAX_TEXT

    def repr1(self, x: Any, level: int) -> str:
        """Return a shortened `repr` of an object. Show nested containers only down to a depth of `level`."""
        cls = type(x)
        if cls is LocalText:
            return str(x)
        for base, make_text in (
            (str, self._cut_text),
            (bytes, self._cut_text),
            (bytearray, self._cut_text),
            (dict, self._show_dict),
            (list, self._show_list),
            (set, self._show_list),
            (frozenset, self._show_list),
            (deque, self._show_list),
            (tuple, self._show_list),
        ):
            if issubclass(cls, base) and not hasattr(cls, "_fields"):
                text = make_text(x, base, level)
                return text if cls is base and base in LITERALS else f"{cls.__name__}({text})"
        names = getattr(cls, "_fields", None) or getattr(cls, "__dataclass_fields__", None)
        if isinstance(names, tuple | dict) and level > 0:
            fields = (f"{name}={self.repr1(getattr(x, name, MISSING), level - 1)}" for name in islice(names, MAX_ITEMS))
            return f"{cls.__name__}({', '.join(fields)})"
        return self.repr_instance(x, level)

    def _cut_text(self, x: Any, base: Any, _: int) -> str:
        is_long = base.__len__(x) > MAX_STRING
        return repr(base.__getitem__(x, slice(MAX_STRING))) + ("..." if is_long else "")

    def _show_dict(self, x: Any, base: Any, level: int) -> str:
        if level <= 0:
            return "{...}"
        items = list(islice(base.items(x), MAX_ITEMS))
        texts = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in items]
        return f"{{{', '.join(texts + ['...'] * (base.__len__(x) > MAX_ITEMS))}}}"

    def _show_list(self, x: Any, base: Any, level: int) -> str:
        left, right = BRACKETS.get(base, ("[", "]"))
        if level <= 0:
            return f"{left}...{right}"
        texts = [self.repr1(item, level - 1) for item in islice(base.__iter__(x), MAX_ITEMS)]
        texts += ["..."] * (base.__len__(x) > MAX_ITEMS)
        comma = "," if base is tuple and len(texts) == 1 else ""
        if base is set and not texts:
            return "set()"
        return f"{left}{', '.join(texts)}{comma}{right}"

    def repr_instance(self, x: object, level: int) -> str:  # noqa: ARG002  as in the base class
        """Return the `repr` of an object that is not a container. If the `repr` is too long, leave out its middle."""
        try:
            text = str.__str__(repr(x))
        except BaseException as error:  # noqa: BLE001  even SystemExit
            return f"<its repr raised {type(error).__name__}>"
        return text if len(text) <= self.maxother else f"{text[: self.maxother - 100]}...{text[-97:]}"


def format_local_variables(traces: Iterable[TracebackType | None]) -> list[dict[int, dict[str, str]]]:
    """Return a list with one dict for each traceback. Raises RuntimeError if no thread can be started.

    The dict of a traceback maps the index of each frame to the dict of the frame. The outermost frame has the index 0. The
    dict of a frame maps the name of each local variable to its value as text. Leave out frames without variables, and
    variables that Python itself has created, such as `__name__`.
    """
    found: list[dict[int, dict[str, object]]] = [
        {number: variables for number, frame in _select_frames(trace) if (variables := _get_variables(frame))}
        for trace in traces
    ]
    texts: list[dict[int, dict[str, str]]] = [
        {number: dict.fromkeys(variables, STOPPED) for number, variables in frames.items()} for frames in found
    ]
    if not any(texts):
        return texts
    thread = threading.Thread(target=_format_all, args=(found, texts), name="mpwatch-locals", daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    # copies, since the thread may go on
    return [{number: dict(variables) for number, variables in frames.items()} for frames in texts]


def _select_frames(trace: TracebackType | None) -> list[tuple[int, FrameType]]:
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    numbered = list(enumerate(frames))
    if len(numbered) > OUTERMOST_FRAMES + INNERMOST_FRAMES:
        numbered[OUTERMOST_FRAMES:-INNERMOST_FRAMES] = []
    return numbered


def _get_variables(frame: FrameType) -> dict[str, object]:
    is_module = frame.f_locals is frame.f_globals or frame.f_code.co_name == "<module>"
    names = [
        (name, value)
        for name, value in list(frame.f_locals.items())
        if not (name.startswith("__") and name.endswith("__"))
        and name.isidentifier()  # not `.0`, the argument of a comprehension
        and not (is_module and issubclass(type(value), DEFINITIONS))
    ]
    return {str.__str__(name): value for name, value in names[:MAX_VARIABLES]}


def _format_all(found: list[dict[int, dict[str, object]]], texts: list[dict[int, dict[str, str]]]) -> None:
    """Convert the values of all variables to text. In each traceback, the values of the innermost frame come first."""
    bounded, total, deadline = BoundedRepr(), 0, monotonic() + LIMIT_SECONDS
    for variables_by_frame, texts_by_frame in zip(found, texts, strict=True):
        for number in sorted(variables_by_frame, reverse=True):
            for name, value in variables_by_frame[number].items():
                if total > MAX_TOTAL or monotonic() > deadline:
                    return
                try:
                    text = bounded.repr(value)[:MAX_TEXT]
                except BaseException as error:  # noqa: BLE001  a subclass of list or dict may raise anything
                    text = f"<its repr raised {type(error).__name__}>"
                texts_by_frame[number][name] = text
                total += len(text)
