"""Send the frames of a traceback as plain values, and rebuild real frames from them. `frames_of` runs in the rank,
`traceback_of` in the watcher.

A debugger, IPython and the traceback module read file, function, lines and columns from a frame's code object. So
`traceback_of` compiles a stub function for each frame: a `raise` at the frame's position, in a function that begins at the
frame's first line. Calling the stub yields the frame. It has no locals but `__tracebackhide__ = True`, if the rank's frame
had that: pytest and IPython hide such a frame.
"""

from __future__ import annotations

from itertools import islice
from types import CodeType, FunctionType, TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

Span = tuple[int, int, int]  # last line, first column, column after the last; columns in bytes of UTF-8
# file, name, qualified name, code's first line, line, module, hidden, span; the span is None if it is unknown
Frame = tuple[str, str, str, int, int, str, bool, Span | None]
HIDE = "__tracebackhide__"
NO_COLUMN = -1  # the compiler then writes no columns
CODE_UNIT = 2  # bytes of an instruction in CPython, for which co_positions() has one entry


def frames_of(trace: TracebackType | None) -> list[Frame]:
    """Read the frames of a traceback, outermost first."""
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_globals.get("__name__", "?")
        line = trace.tb_lineno or 0  # generated code may have no lines
        names = (str.__str__(code.co_filename), str.__str__(code.co_name), str.__str__(code.co_qualname))
        module = str.__str__(module) if isinstance(module, str) else "?"
        # Reading f_locals copies all locals, so it comes second. A callable counts as False; pytest would call it.
        hides = HIDE in code.co_varnames and trace.tb_frame.f_locals.get(HIDE) is True
        frames.append((*names, code.co_firstlineno, line, module, hides, _span_of(trace, line)))
        trace = trace.tb_next
    return frames


def _span_of(trace: TracebackType, line: int) -> Span | None:
    """Read the rest of the position at which a frame raised. Return None for a position that cannot be compiled."""
    unknown = (None, None, None, None)
    start, end, column, end_column = next(
        islice(trace.tb_frame.f_code.co_positions(), max(trace.tb_lasti, 0) // CODE_UNIT, None), unknown
    )
    if start != line or end is None or column is None or end_column is None:
        return None
    return (end, column, end_column) if (start, column) <= (end, end_column) else None


def traceback_of(frames: list[Frame]) -> TracebackType | None:
    """Rebuild a traceback from its frames, without recursion: a RecursionError has a thousand of them."""
    stubs: dict[Frame, CodeType] = {}  # frames of a recursion have the same code
    trace = None
    for frame in reversed(frames):
        if frame not in stubs:
            stubs[frame] = _compile_stub(frame)
        raised = _raise_in(stubs[frame], frame)
        trace = TracebackType(trace, raised.tb_frame, raised.tb_lasti, frame[4])
    return trace


def _compile_stub(frame: Frame) -> CodeType:
    import ast  # only here: a rank does not need it

    file, name, qualname, first, line, _, hides, span = frame
    end, column, end_column = span or (line, NO_COLUMN, NO_COLUMN)
    at: Any = {"lineno": line, "end_lineno": end, "col_offset": column, "end_col_offset": end_column}
    body: list[ast.stmt] = [ast.Raise(ast.Name("error", ast.Load(), **at), None, **at)]
    if hides:
        body.insert(0, ast.Assign([ast.Name(HIDE, ast.Store(), **at)], ast.Constant(value=True, **at), **at))
    parameters = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    # the line of the `def` becomes co_firstlineno; lines are stored relative to it, so replacing it later would move them
    start: Any = {"lineno": first, "end_lineno": first, "col_offset": 0, "end_col_offset": 0}
    module = ast.Module([ast.FunctionDef("stub", parameters, body, [], **start)], [])
    (code,) = (thing for thing in compile(module, "stub", "exec").co_consts if isinstance(thing, CodeType))
    return code.replace(co_filename=file, co_name=name, co_qualname=qualname)


def _raise_in(code: CodeType, frame: Frame) -> TracebackType:
    variables = {"__name__": frame[5], "__file__": frame[0], "error": _StubError()}
    trace = None
    try:
        FunctionType(code, variables)()
    except _StubError as error:
        del variables["error"]  # it refers to the frame, which refers to these variables
        trace = error.__traceback__
    assert trace is not None  # the stub has raised
    assert trace.tb_next is not None  # the first entry is of this function
    return trace.tb_next


class _StubError(Exception):
    pass
