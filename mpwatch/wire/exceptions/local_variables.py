"""Converts the local variables in a traceback to text, for debug="locals". This module runs in the rank.

`repr` runs code of the variable's class, which can take long. After LIMIT_SECONDS, the other texts are STOPPED.
"""

from collections.abc import Iterable
from reprlib import Repr
from traceback import walk_tb
from types import FrameType, FunctionType, ModuleType, TracebackType

from mpwatch.os_support.clock import monotonic

LIMIT_SECONDS = 1.0
MAX_VARIABLES = 100  # of a frame
MAX_ITEMS = 20  # of a container
MAX_STRING = 500  # characters of a string, or bytes
MAX_TEXT = 2000  # characters of a variable
STOPPED = "<its text was not made in time>"
DEFINITIONS = (ModuleType, FunctionType, type)  # such values are left out of the frames of modules


class LocalText(str):
    """The value of a local variable as text. Its `repr` has no quotes, so a debugger shows `[1, 2]` and not `'[1, 2]'`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str.__str__(self)


class BoundedRepr(Repr):
    """reprlib with our limits, which also cuts bytes like strings."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = self.maxdict = MAX_ITEMS
        self.maxstring, self.maxlong, self.maxother = MAX_STRING, MAX_STRING, MAX_TEXT

    repr_bytes = repr_bytearray = Repr.repr_str


def format_local_variables(traces: Iterable[TracebackType | None]) -> list[dict[int, dict[str, str]]]:
    """Return for each traceback the texts of the variables: index of the frame (0 is the outermost) -> name -> text."""
    deadline = monotonic() + LIMIT_SECONDS
    found = []
    for trace in traces:
        frames = list(enumerate(frame for frame, _ in walk_tb(trace)))
        # the innermost frame first, since time may run out
        texts = {number: _format_variables(_get_variables(frame), deadline) for number, frame in reversed(frames)}
        found.append({number: variables for number, variables in texts.items() if variables})
    return found


def _get_variables(frame: FrameType) -> dict[str, object]:
    is_module = frame.f_locals is frame.f_globals or frame.f_code.co_name == "<module>"
    names = [
        (name, value)
        for name, value in list(frame.f_locals.items())
        if not (name.startswith("__") and name.endswith("__"))
        and name.isidentifier()  # not `.0`, the argument of a comprehension
        and not (is_module and issubclass(type(value), DEFINITIONS))
    ]
    return dict(names[:MAX_VARIABLES])


def _format_variables(variables: dict[str, object], deadline: float) -> dict[str, str]:
    bounded, texts = BoundedRepr(), {}
    for name, value in variables.items():
        try:
            texts[name] = bounded.repr(value)[:MAX_TEXT] if monotonic() < deadline else STOPPED
        except BaseException as error:  # noqa: BLE001  even SystemExit
            texts[name] = f"<its repr raised {type(error).__name__}>"
    return texts
