"""The local variables of the frames of a traceback, as text: for the option `capture_locals`. Runs in the rank.

The texts are made by `repr`, which runs code of the variables' classes. It may raise, hang or return very much. So the texts
are bounded in number and length, and made in a daemon thread, for which the rank waits LIMIT_SECONDS. A text that is not
there by then is left out.
"""

from __future__ import annotations

import threading
import time
from reprlib import Repr
from types import FunctionType, ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType, TracebackType

LIMIT_SECONDS = 1.0
OUTERMOST_FRAMES, INNERMOST_FRAMES = 20, 80  # of each traceback; those between belong to a recursion
MAX_VARIABLES = 100  # of a frame
MAX_TEXT = 2000  # characters of a variable
MAX_TOTAL = 1 << 20  # characters of all variables
STOPPED = "<its text was not made in time>"
DEFINITIONS = (ModuleType, FunctionType, type)  # left out of the frames of modules


class LocalText(str):
    """The text of a local variable. Its `repr` is the text itself, so debuggers show it as they would show the value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str.__str__(self)


class BoundedRepr(Repr):
    """Makes texts of bounded length. Of a long list, dictionary or string it shows the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = self.maxarray = self.maxdict = 20
        self.maxstring = self.maxlong = 500
        self.maxother = MAX_TEXT

    def repr_instance(self, x: object, level: int) -> str:  # noqa: ARG002  as in the base class
        """Return the text of any other object. (`Repr` replaces a repr that raises by the object's address.)"""
        try:
            text = str.__str__(repr(x))
        except BaseException as error:  # noqa: BLE001  even SystemExit
            return f"<its repr raised {type(error).__name__}>"
        return text if len(text) <= self.maxother else f"{text[: self.maxother - 100]}...{text[-97:]}"


def format_local_variables(traces: Iterable[TracebackType | None]) -> list[dict[int, dict[str, str]]]:
    """Return the texts of the local variables: for each traceback those of its frames, by index, and in each frame by name.

    The outermost frame has index 0. Frames without variables are left out, and so are names that Python has made.
    Raises RuntimeError if no thread can be started.
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
    """Make the texts, those of the innermost frames first."""
    bounded, total, deadline = BoundedRepr(), 0, time.monotonic() + LIMIT_SECONDS
    for variables_by_frame, texts_by_frame in zip(found, texts, strict=True):
        for number in sorted(variables_by_frame, reverse=True):
            for name, value in variables_by_frame[number].items():
                if total > MAX_TOTAL or time.monotonic() > deadline:
                    return
                try:
                    text = bounded.repr(value)[:MAX_TEXT]
                except BaseException as error:  # noqa: BLE001  from a subclass of list or dict
                    text = f"<its repr raised {type(error).__name__}>"
                texts_by_frame[number][name] = text
                total += len(text)
