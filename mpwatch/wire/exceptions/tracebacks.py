"""Send the frames of a traceback as plain values, and rebuild real frames from them.

    in the rank:     read_frames       traceback -> a list of `Frame`, called by encoder.py
    in the watcher:  build_traceback   a list of `Frame` -> traceback, called by decoder.py

A debugger, IPython and the traceback module read file, function, lines and columns from a frame's code object. So
`build_traceback` compiles a stub function for each frame: a `raise` at the frame's position, in a function that begins at
the frame's first line. A call of the stub raises, and leaves the wanted frame in the traceback. The frame has no local
variables, with one exception: `__tracebackhide__ = True`, if the rank's frame had it. pytest and IPython hide such a frame.
"""

from __future__ import annotations

from itertools import islice
from types import CodeType, FunctionType, TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# last line, first column, column after the last one; columns count bytes of UTF-8
Span = tuple[int, int, int]
# file, name, qualified name, first line of the code, current line, module, is hidden, span (None if it is unknown)
Frame = tuple[str, str, str, int, int, str, bool, Span | None]
HIDE_VARIABLE = "__tracebackhide__"
NO_COLUMN = -1  # makes the compiler write no columns
CODE_UNIT = 2  # bytes of code for which co_positions() has one entry; see os_support/cpython_private.py


def read_frames(trace: TracebackType | None) -> list[Frame]:
    """Return the frames of a traceback, outermost first."""
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_globals.get("__name__", "?")
        line = trace.tb_lineno or 0  # generated code may have no line numbers
        names = (str.__str__(code.co_filename), str.__str__(code.co_name), str.__str__(code.co_qualname))
        module = str.__str__(module) if isinstance(module, str) else "?"
        # The second test copies all local variables, so it runs only after the first. A callable, which pytest would call,
        # counts as False.
        is_hidden = HIDE_VARIABLE in code.co_varnames and trace.tb_frame.f_locals.get(HIDE_VARIABLE) is True
        frames.append((*names, code.co_firstlineno, line, module, is_hidden, _read_span(trace, line)))
        trace = trace.tb_next
    return frames


def _read_span(trace: TracebackType, line: int) -> Span | None:
    """Return the span of the instruction that raised; None if the compiler would reject that span."""
    unknown = (None, None, None, None)
    start, end, column, end_column = next(
        islice(trace.tb_frame.f_code.co_positions(), max(trace.tb_lasti, 0) // CODE_UNIT, None), unknown
    )
    if start != line or end is None or column is None or end_column is None:
        return None
    return (end, column, end_column) if (start, column) <= (end, end_column) else None


def build_traceback(frames: list[Frame]) -> TracebackType | None:
    """Return a traceback with these frames. It does not recurse, because a RecursionError has a thousand frames."""
    stubs: dict[Frame, CodeType] = {}  # the frames of a recursion share their code
    trace = None
    for frame in reversed(frames):
        if frame not in stubs:
            stubs[frame] = _compile_stub(frame)
        raised = _call_stub(stubs[frame], frame)
        trace = TracebackType(trace, raised.tb_frame, raised.tb_lasti, frame[4])
    return trace


def _compile_stub(frame: Frame) -> CodeType:
    import ast  # not at the top: a rank never needs it

    file, name, qualname, first, line, _, is_hidden, span = frame
    end, column, end_column = span or (line, NO_COLUMN, NO_COLUMN)
    position: Any = {"lineno": line, "end_lineno": end, "col_offset": column, "end_col_offset": end_column}
    body: list[ast.stmt] = [ast.Raise(ast.Name("error", ast.Load(), **position), None, **position)]
    if is_hidden:
        body.insert(
            0,
            ast.Assign([ast.Name(HIDE_VARIABLE, ast.Store(), **position)], ast.Constant(value=True, **position), **position),
        )
    parameters = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    # The line of the `def` becomes co_firstlineno. It cannot be replaced later: the code stores its lines relative to it.
    def_position: Any = {"lineno": first, "end_lineno": first, "col_offset": 0, "end_col_offset": 0}
    module = ast.Module([ast.FunctionDef("stub", parameters, body, [], **def_position)], [])
    (code,) = (constant for constant in compile(module, "stub", "exec").co_consts if isinstance(constant, CodeType))
    return code.replace(co_filename=file, co_name=name, co_qualname=qualname)


def _call_stub(code: CodeType, frame: Frame) -> TracebackType:
    variables = {"__name__": frame[5], "__file__": frame[0], "error": _StubError()}
    trace = None
    try:
        FunctionType(code, variables)()
    except _StubError as error:
        del variables["error"]  # the error refers to the frame, and the frame to these variables: a reference cycle
        trace = error.__traceback__
    assert trace is not None  # the stub raised
    assert trace.tb_next is not None  # the first entry is that of this function
    return trace.tb_next


class _StubError(Exception):
    pass
