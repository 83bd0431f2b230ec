"""Frames over the wire: told as plain values in the rank, made again as real frames with nothing in them in the watcher.

A debugger, IPython and the traceback module take file, function, line and the function's first line from a frame's code. So
a code object is made for each that says all of these, and is run for a moment. It has no columns: carets would point at
what the made-up code does. A frame that hid itself from pytest and IPython (`__tracebackhide__ = True`) does so still.
"""

import sys
from types import CodeType, TracebackType
from typing import Any

__all__ = ["Frame", "frames_of", "traceback_of"]

Frame = tuple[str, str, str, int, int, str, bool]  # file, name, qualified name, code's first line, line, module, hidden
HIDE = "__tracebackhide__"
STUB = compile("raise error", "stub", "exec")
UNITS_AN_ENTRY = 8  # of a table of lines
NO_COLUMNS = 13  # the kind of an entry (CPython: Objects/locations.md)


def frames_of(trace: TracebackType | None) -> list[Frame]:
    """The frames of a traceback, outermost first."""
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_globals.get("__name__", "?")
        line = trace.tb_lineno or 0  # code that was generated may have no lines
        names = (str.__str__(code.co_filename), str.__str__(code.co_name), str.__str__(code.co_qualname))
        module = str.__str__(module) if isinstance(module, str) else "?"
        # a look at the locals makes a copy of them; what decides by the error, a callable, is not asked
        hides = HIDE in code.co_varnames and trace.tb_frame.f_locals.get(HIDE) is True
        frames.append((*names, code.co_firstlineno, line, module, hides))
        trace = trace.tb_next
    return frames


def traceback_of(frames: list[Frame]) -> TracebackType | None:
    """A traceback of such frames."""
    trace = None
    for frame in reversed(frames):
        made = _run(_code_of(frame), frame)
        trace = TracebackType(trace, made.tb_frame, made.tb_lasti, frame[4])
    return trace


def _code_of(frame: Frame) -> CodeType:
    file, name, qualname, first, line, *_ = frame
    return STUB.replace(
        co_filename=file,
        co_name=name,
        co_qualname=qualname,
        co_firstlineno=first,
        co_linetable=_lines(line - first),
    )


def _lines(delta: int) -> bytes:
    """A table that puts all of the stub on one line, so many after its first."""
    units = len(STUB.co_code) // 2
    table = b""
    for start in range(0, units, UNITS_AN_ENTRY):
        length = min(UNITS_AN_ENTRY, units - start)
        table += bytes([0x80 | NO_COLUMNS << 3 | length - 1]) + _signed(delta if start == 0 else 0)
    return table


def _signed(number: int) -> bytes:
    """Six bits at a time, the lowest first; the lowest of all is the sign."""
    rest = abs(number) << 1 | (number < 0)
    data = b""
    while rest >= 64:  # noqa: PLR2004
        data += bytes([0x40 | rest & 0x3F])
        rest >>= 6
    return data + bytes([rest])


def _run(code: CodeType, frame: Frame) -> Any:
    names = {"__name__": frame[5], "__file__": frame[0], "error": _Stub()}
    try:
        exec(code, names, {HIDE: True} if frame[6] else {})  # noqa: S102  it does nothing but raise
    except _Stub:
        trace = sys.exc_info()[2]
        assert trace is not None
        del names["error"]
        return trace.tb_next
    raise AssertionError("a stub that did not raise")


class _Stub(Exception):  # noqa: N818
    pass
