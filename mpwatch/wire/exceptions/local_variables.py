"""Converts the local variables in a traceback to text, for debug="locals". This module runs in the rank.

`repr` runs code of the variable's class and can hang. So a daemon thread makes the texts, and the rank waits at most
LIMIT_SECONDS for all of them. A text that is not ready in time is replaced by STOPPED.
"""

from __future__ import annotations

import builtins
import threading
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
STOPPED = "<its text was not made in time>"
DEFINITIONS = (ModuleType, FunctionType, type)  # such values are left out of the frames of modules


class LocalText(str):
    """The value of a local variable as text. Its `repr` has no quotes, so a debugger shows `[1, 2]` and not `'[1, 2]'`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str.__str__(self)


class BoundedRepr(Repr):
    """reprlib with our limits, which also survives a `__repr__` that exits, and cuts bytes like strings."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = self.maxdict = MAX_ITEMS
        self.maxstring, self.maxlong, self.maxother = MAX_STRING, MAX_STRING, MAX_TEXT

    repr_bytes = repr_bytearray = Repr.repr_str

    def repr_LocalText(self, x: LocalText, _: int) -> str:  # noqa: N802  reprlib looks for this name
        return str(x)

    def repr_instance(self, x: object, _: int) -> str:
        try:
            text = str.__str__(builtins.repr(x))
        except BaseException as error:  # noqa: BLE001  even SystemExit
            return f"<its repr raised {type(error).__name__}>"
        return text if len(text) <= self.maxother else f"{text[: self.maxother - 100]}...{text[-97:]}"


def format_local_variables(traces: Iterable[TracebackType | None]) -> list[dict[int, dict[str, str]]]:
    """Return for each traceback the texts of the variables: index of the frame (0 is the outermost) -> name -> text. Raises
    RuntimeError if no thread can be started.
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


def _get_variables(frame: FrameType) -> dict[str, Any]:
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
    """Fill in the texts. The innermost frame of each traceback comes first, since time may run out."""
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
