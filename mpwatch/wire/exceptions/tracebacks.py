"""Converts the frames of a traceback to builtin values in the rank, and rebuilds the frames in the watcher.

    in the rank:     read_frames       traceback -> a list of `Frame`, called by encoder.py
    in the watcher:  build_traceback   a list of `Frame` -> tblib.Traceback -> traceback, called by decoder.py

A `Frame` is the dictionary that tblib makes from one entry of a traceback, with three more values (see `make_frame`). The
rank makes it without tblib, which it might no longer be able to import when its function has raised.

A debugger, IPython and the traceback module read the file, the function, the lines and the columns from a frame's code
object. For each frame of the rank, `build_traceback` compiles a stub, which is a code object with the same file, function,
lines and columns. A stub contains only one statement, a `raise` statement. `build_traceback` runs the stub, and catches the
exception that the stub raises. The frame of the stub looks like the rank's frame.

The frame of the stub has the local variables that are stored in the `Frame`. If one of these variables is
`__tracebackhide__`, pytest and IPython hide the frame. With debug="locals", the frame has the rank's local
variables as text (local_variables.py).
"""

from __future__ import annotations

from itertools import islice
from types import CodeType, FrameType, TracebackType

from mpwatch.wire.exceptions.source_lines import COMMAND

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

Frame = dict[str, "Any"]  # `make_frame` shows its keys
# The position of an expression: last line, first column, and the column after the last one. Columns count bytes of UTF-8.
Span = tuple[int, int, int]
HIDE_VARIABLE = "__tracebackhide__"
NO_COLUMN = -1  # makes the compiler write no columns
CODE_UNIT = 2  # bytes of code for which co_positions() has one entry; see os_support/cpython_private.py
NO_FIRST_LINE = 0  # of code from a string: Python 3.14 would show lines of the caller's own `python -c` program
RAISED = "__mpwatch_error"  # the variable of a stub, which is removed when the stub has raised


def read_frames(trace: TracebackType | None) -> list[Frame]:
    """Return the frames of a traceback, from the outermost to the innermost. The frames contain only builtin values."""
    frames = []
    while trace is not None:
        frames.append(_read_frame(trace))
        trace = trace.tb_next
    return frames


def make_frame(
    *,
    file: str,
    name: str,
    qualname: str,
    first_line: int,
    line: int,
    module: str,
    is_hidden: bool = False,
    span: Span | None = None,
) -> Frame:
    """Return a dictionary in the format of `tblib.Traceback.to_dict`.

    The dictionary also contains three values that this format lacks: "co_qualname", "co_firstlineno" and "span".

    Args:
        file: name of the file.
        name: name of the function.
        qualname: qualified name of the function.
        first_line: first line of the function.
        line: line that was executed.
        module: name of the module.
        is_hidden: whether `__tracebackhide__` was true.
        span: position of the expression that raised, or None if it is unknown.
    """
    frame = {
        "f_globals": {"__name__": module, "__file__": file},
        "f_locals": {HIDE_VARIABLE: True} if is_hidden else {},
        "f_code": {"co_filename": file, "co_name": name, "co_qualname": qualname, "co_firstlineno": first_line},
        "f_lineno": line,
    }
    return {"tb_frame": frame, "tb_lineno": line, "tb_next": None, "span": span}


def add_local_variables(frames: list[Frame], texts: dict[int, dict[str, str]]) -> None:
    """Add the values of local variables, as text, to the frames.

    `texts[i]` maps the name of each variable of frame i to its value as text.
    """
    from mpwatch.wire.exceptions.local_variables import LocalText

    for number, variables in texts.items():
        local_variables = frames[number]["tb_frame"]["f_locals"]
        frames[number]["tb_frame"]["f_locals"] = {
            name: LocalText(text) for name, text in variables.items()
        } | local_variables


def get_file(frame: Frame) -> str:
    """Return the name of the file that contains the frame's code."""
    file: str = frame["tb_frame"]["f_code"]["co_filename"]
    return file


def is_hidden(frame: Frame) -> bool:
    """Return whether pytest and IPython hide the frame."""
    return frame["tb_frame"]["f_locals"].get(HIDE_VARIABLE) is True


def _read_frame(trace: TracebackType) -> Frame:
    code = trace.tb_frame.f_code
    module = trace.tb_frame.f_globals.get("__name__")
    line = max(trace.tb_lineno or 0, 0)  # generated code may have no line numbers: None, or -1 in early versions of 3.11
    return make_frame(
        file=str.__str__(code.co_filename),
        name=str.__str__(code.co_name),
        qualname=str.__str__(code.co_qualname),
        first_line=code.co_firstlineno,
        line=line,
        module=str.__str__(module) if isinstance(module, str) else "",
        is_hidden=_hides(trace.tb_frame),
        span=_read_span(trace, line),
    )


def _hides(frame: FrameType) -> bool:
    # The second test copies all local variables, so it runs only if the first is true. pytest also allows a callable as the
    # value, which counts as False here.
    return HIDE_VARIABLE in frame.f_code.co_varnames and frame.f_locals.get(HIDE_VARIABLE) is True


def _read_span(trace: TracebackType, line: int) -> Span | None:
    """Return the position of the instruction that raised the exception.

    Return None if the position is unknown, or if `compile` would reject a statement at this position.
    """
    unknown = (None, None, None, None)
    start, end, column, end_column = next(
        islice(trace.tb_frame.f_code.co_positions(), max(trace.tb_lasti, 0) // CODE_UNIT, None), unknown
    )
    if start != line or end is None or column is None or end_column is None:
        return None
    return (end, column, end_column) if (start, column) <= (end, end_column) else None


def build_traceback(frames: list[Frame]) -> TracebackType | None:
    """Return a traceback with these frames.

    This function uses no recursion, because the traceback of a RecursionError has about 1,000 frames.
    """
    from tblib import Traceback

    stubs: dict[tuple[Any, ...], CodeType] = {}  # the frames of a recursion share their code
    trace = None
    for frame in reversed(frames):
        key = (*frame["tb_frame"]["f_code"].values(), frame["tb_lineno"], frame["span"])
        if key not in stubs:
            stubs[key] = _compile_stub(frame)
        entry = Traceback.from_dict(frame)
        raised = _run_stub(stubs[key], entry.tb_frame.f_globals, entry.tb_frame.f_locals)
        trace = TracebackType(trace, raised.tb_frame, raised.tb_lasti, entry.tb_lineno)
    return trace


def _compile_stub(frame: Frame) -> CodeType:
    import ast  # not at the top: a rank never needs it

    names, line = frame["tb_frame"]["f_code"], frame["tb_lineno"]
    end, column, end_column = frame["span"] or (line, NO_COLUMN, NO_COLUMN)
    # The lines of the stub are relative to its first line. That is line 1 until `replace` below sets another one.
    first = NO_FIRST_LINE if names["co_filename"] == COMMAND else min(names["co_firstlineno"], line)
    before = first - 1
    position: Any = {
        "lineno": line - before,
        "end_lineno": end - before,
        "col_offset": column,
        "end_col_offset": end_column,
    }
    module = ast.Module([ast.Raise(ast.Name(RAISED, ast.Load(), **position), None, **position)], [])
    return compile(module, "stub", "exec").replace(
        co_filename=names["co_filename"],
        co_name=names["co_name"],
        co_qualname=names["co_qualname"],
        co_firstlineno=first,
    )


def _run_stub(code: CodeType, global_variables: dict[str, Any], local_variables: dict[str, Any]) -> TracebackType:
    global_variables[RAISED] = _StubError()
    trace = None
    try:
        exec(code, global_variables, local_variables)  # noqa: S102  the stub
    except _StubError as error:
        trace = error.__traceback__
    del global_variables[RAISED]  # otherwise a reference cycle: the error refers to the frame, and that to these variables
    assert trace is not None  # the stub raised
    assert trace.tb_next is not None  # the first entry is the frame of this function
    return trace.tb_next


class _StubError(Exception):
    pass
