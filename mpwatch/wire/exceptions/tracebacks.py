"""The frames of a traceback: plain values in the rank, which tblib makes into frames again in the caller.

    rank    read_frames       traceback -> [Frame, ...], the outermost first
    caller  build_traceback   [Frame, ...] -> tblib -> traceback

tblib keeps neither the columns of the expression that raised, which Python marks with carets, nor the first line and the
qualified name of the function, with which pytest and debuggers show it. The code of a frame cannot be changed. So a
statement that raises at these columns is run with the variables of tblib's frame, and its frame is used.

pytest and IPython hide a frame that has a true `__tracebackhide__`, so this variable is sent, too. The values of other
variables are sent only with debug="locals", as text (local_variables.py).
"""

from __future__ import annotations

import ast  # traceback imports it at its first use, which would make a failure later by 3 ms
from itertools import islice
from types import CodeType, TracebackType

from mpwatch.wire.exceptions.source_lines import COMMAND

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any

Frame = dict[str, "Any"]  # the keys are in `_read_frame`, and "locals" if the rank has sent variables
# Where an expression ends and begins: last line, first column, column after the last one. Columns are bytes of UTF-8.
Span = tuple[int, int, int]
HIDE_VARIABLE = "__tracebackhide__"
CODE_UNIT = 2  # bytes of code for which co_positions() has one entry; see os_support/cpython_private.py
NO_COLUMN = -1  # makes the compiler write no columns
NO_FIRST_LINE = 0  # of code from a string: Python 3.14 would show lines of the caller's own `python -c` program


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


def build_traceback(frames: Sequence[Frame]) -> TracebackType | None:
    trace = None
    made: dict[str, TracebackType] = {}  # a recursion has a thousand equal frames
    for frame in reversed(frames):
        key = str(frame)
        if key not in made:
            made[key] = _run_again(_compile_raise(frame), _make_frame(frame))
        trace = TracebackType(trace, made[key].tb_frame, made[key].tb_lasti, frame["line"])
    return trace


def _make_frame(frame: Frame) -> FrameType:
    from tblib import Traceback

    entry: TracebackType = Traceback.from_dict(
        {
            "tb_frame": {
                "f_globals": {"__name__": frame["module"], "__file__": frame["file"]},
                "f_locals": frame.get("locals", {}) | ({HIDE_VARIABLE: True} if frame["is_hidden"] else {}),
                "f_code": {"co_filename": frame["file"], "co_name": frame["name"]},
                "f_lineno": frame["line"],
            },
            "tb_lineno": frame["line"],
            "tb_next": None,  # linked above: from_dict recurses, and a RecursionError has 1,000 frames
        }
    ).as_traceback()
    return entry.tb_frame


def _compile_raise(frame: Frame) -> CodeType:
    line = frame["line"]
    end, column, end_column = frame["span"] or (line, NO_COLUMN, NO_COLUMN)
    first = NO_FIRST_LINE if frame["file"] == COMMAND else min(frame["first_line"], line)
    before = first - 1  # the compiler counts from line 1, until `replace` sets another first line
    place: Any = {
        "lineno": line - before,
        "end_lineno": end - before,
        "col_offset": column,
        "end_col_offset": end_column,
    }
    module = ast.Module([ast.Raise(ast.Constant(None, **place), None, **place)], [])
    return compile(module, frame["file"], "exec").replace(
        co_name=frame["name"], co_qualname=frame["qualname"], co_firstlineno=first
    )


def _run_again(code: CodeType, frame: FrameType) -> TracebackType:
    trace: Any = None
    try:
        exec(code, frame.f_globals, frame.f_locals)  # noqa: S102  it only raises
    except TypeError as error:  # None is no exception
        trace = error.__traceback__
    raised: TracebackType = trace.tb_next  # the first entry is the frame of this function
    return raised
