"""Adds to the frames that tblib makes what tblib does not keep.

These are the columns of the expression that raised, which Python marks with carets (tblib's own code has other columns), and
the first line and the qualified name of the function, with which pytest and debuggers show it. The code of a frame cannot be
changed. So a statement that raises at these columns is run with the variables of tblib's frame, and its frame is used.

If tblib learns to keep the columns (`co_positions`), delete this file.
"""

import ast
from collections.abc import Mapping, Sequence
from types import CodeType, TracebackType
from typing import Any

from mpwatch.wire.exceptions.source_lines import COMMAND

Frame = Mapping[str, Any]  # see tracebacks.py
NO_COLUMN = -1  # makes the compiler write no columns
NO_FIRST_LINE = 0  # of code from a string: Python 3.14 would show lines of the caller's own `python -c` program


def add_carets(trace: TracebackType | None, frames: Sequence[Frame]) -> TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    codes: dict[tuple[Any, ...], CodeType] = {}  # the frames of a recursion share their code
    for entry, frame in zip(reversed(entries), reversed(frames), strict=True):
        key = tuple(frame[name] for name in ("file", "qualname", "first_line", "line", "span"))
        if key not in codes:
            codes[key] = _compile_raise(frame)
        raised = _run_again(codes[key], entry)
        trace = TracebackType(trace, raised.tb_frame, raised.tb_lasti, frame["line"])
    return trace


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


def _run_again(code: CodeType, entry: TracebackType) -> TracebackType:
    trace: Any = None
    try:
        exec(code, entry.tb_frame.f_globals, entry.tb_frame.f_locals)  # noqa: S102  it only raises
    except TypeError as error:  # None is no exception
        trace = error.__traceback__
    raised: TracebackType = trace.tb_next  # the first entry is the frame of this function
    return raised
