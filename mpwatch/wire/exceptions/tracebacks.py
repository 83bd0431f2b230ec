"""The frames of a traceback: plain values in the rank, which tblib makes into frames again in the caller.

    rank    read_frames       traceback -> [Frame, ...], the outermost first
    caller  build_traceback   [Frame, ...] -> tblib -> traceback; carets.py adds what tblib lacks

pytest and IPython hide a frame that has a true `__tracebackhide__`, so this variable is sent, too. The values of other
variables are sent only with debug="locals", as text (local_variables.py).
"""

from __future__ import annotations

from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Any

Frame = dict[str, "Any"]  # the keys are in `_read_frame`, and "locals" if the rank has sent variables
# Where an expression ends and begins: last line, first column, column after the last one. Columns are bytes of UTF-8.
Span = tuple[int, int, int]
HIDE_VARIABLE = "__tracebackhide__"
CODE_UNIT = 2  # bytes of code for which co_positions() has one entry; see os_support/cpython_private.py


def read_frames(trace: TracebackType | None) -> list[Frame]:
    frames = []
    while trace is not None:
        frames.append(_read_frame(trace))
        trace = trace.tb_next
    return frames


def _read_frame(trace: TracebackType) -> Frame:
    code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals.get("__name__")
    line = max(trace.tb_lineno or 0, 0)  # generated code may have no line numbers: None, or -1 in early versions of 3.11
    return {
        "file": str.__str__(code.co_filename),
        "name": str.__str__(code.co_name),
        "qualname": str.__str__(code.co_qualname),
        "first_line": code.co_firstlineno,
        "line": line,
        "module": str.__str__(module) if isinstance(module, str) else "",
        "is_hidden": _hides(trace.tb_frame),
        "span": _read_span(trace, line),
    }


def _hides(frame: FrameType) -> bool:
    # f_locals copies all variables, so it is read only if it has this one. A callable, which pytest allows, counts as False.
    return HIDE_VARIABLE in frame.f_code.co_varnames and frame.f_locals.get(HIDE_VARIABLE) is True


def _read_span(trace: TracebackType, line: int) -> Span | None:
    """Return None if the position is unknown, or if `compile` would reject a statement there."""
    unknown = (None, None, None, None)
    start, end, column, end_column = next(
        islice(trace.tb_frame.f_code.co_positions(), max(trace.tb_lasti, 0) // CODE_UNIT, None), unknown
    )
    if start != line or end is None or column is None or end_column is None:
        return None
    return (end, column, end_column) if (start, column) <= (end, end_column) else None


def build_traceback(frames: list[Frame]) -> TracebackType | None:
    from tblib import Traceback

    from mpwatch.wire.exceptions.carets import add_carets

    first = None
    for frame in reversed(frames):
        entry = Traceback.from_dict(
            {
                "tb_frame": {
                    "f_globals": {"__name__": frame["module"], "__file__": frame["file"]},
                    "f_locals": frame.get("locals", {}) | ({HIDE_VARIABLE: True} if frame["is_hidden"] else {}),
                    "f_code": {"co_filename": frame["file"], "co_name": frame["name"]},
                    "f_lineno": frame["line"],
                },
                "tb_lineno": frame["line"],
                "tb_next": None,  # linked below: from_dict recurses, and a RecursionError has 1,000 frames
            }
        )
        entry.tb_next = first
        first = entry
    return add_carets(first.as_traceback(), frames) if first is not None else None
