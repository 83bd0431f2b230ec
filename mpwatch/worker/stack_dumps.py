"""Writes stacks into the rank's stack pipe after a crash, and when the watcher asks for them. This module runs in a rank.

The watcher asks by one of two signals, because each works where the other one fails:

- PYTHON_DUMP_SIGNAL has a handler in Python, which writes the stacks of all threads. It does not run while the main thread
  computes in C code, or waits there, for example in a collective of gloo.
- For NATIVE_DUMP_SIGNAL, faulthandler has a handler in C, which runs at once, even while a thread holds the GIL, and writes
  the stack of the main thread. While a thread enters or leaves a function, that function's frame is invalid: Python 3.11 to
  3.13 can crash then (in up to 6 % of the dumps of `sorted(key=function)`), and 3.14 leaves out the callers.

So the watcher sends the second signal only if the rank does not begin to write its stacks in time. Both handlers write
without blocking. If the pipe is full, the rest of the stacks is lost.

PYTHON_DUMP_SIGNAL can interrupt a system call of a C library, which then fails with EINTR. If the user has set a tracer
(`sys.settrace`), it sees the frames of the Python handler.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from contextlib import suppress

from mpwatch.os_support.signals import NATIVE_DUMP_SIGNAL, PYTHON_DUMP_SIGNAL, set_handler
from mpwatch.wire.messages import STACKS_END

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

MAX_FRAMES = 100  # of a thread, as in faulthandler
MAX_DUMP = 60_000  # bytes of all stacks: what is more than a pipe holds would be lost, and the end mark with it
MAX_NAME = 500  # characters, as in faulthandler

c_enable = faulthandler.enable
_crash_fd: int  # where the stack of a crash goes, unless the function has chosen another file
_has_other_file = False
visit: Callable[[FrameType | None], object] = lambda _: False  # noqa: E731  opens a visitor's prompt instead of stacks: see debugger.py


def register_stack_dumps(pipe: int) -> int:
    """Make this rank write its stacks into this pipe. Return the identifier of the main thread."""
    main_thread = threading.get_ident()
    os.set_blocking(pipe, False)
    os.set_inheritable(pipe, False)
    faulthandler.enable = _enable_for_user
    _enable_crash_stack(pipe)
    if NATIVE_DUMP_SIGNAL is not None:
        faulthandler.register(NATIVE_DUMP_SIGNAL, file=pipe, all_threads=False)
    if PYTHON_DUMP_SIGNAL is not None:
        set_handler(PYTHON_DUMP_SIGNAL, StackWriter(pipe, main_thread))
    os.register_at_fork(after_in_child=_leave_child_alone)
    return main_thread


def _leave_child_alone() -> None:
    """In a process that the function has forked: its crash is not the rank's."""
    faulthandler.enable = c_enable
    if not _has_other_file:
        faulthandler.disable()


def redirect_crash_stack(target: socket.socket) -> None:
    """Make faulthandler write the stack of a crash into this socket, unless the function has chosen another file."""
    if not _has_other_file:
        _enable_crash_stack(target.detach())


def _enable_crash_stack(fd: int) -> None:
    global _crash_fd, _has_other_file
    c_enable(file=fd, all_threads=False)
    _crash_fd, _has_other_file = fd, False


def _enable_for_user(file: Any = None, *args: Any, **options: Any) -> None:
    """Replace `faulthandler.enable`: the stack of a crash that would go to stderr goes to the watcher, for its report."""
    global _has_other_file
    if file is None or file is sys.stderr:
        _enable_crash_stack(_crash_fd)
    else:
        c_enable(file, *args, **options)
        _has_other_file = True


class StackWriter:
    """The handler of PYTHON_DUMP_SIGNAL, which writes the stacks of all threads, the main thread first, as faulthandler."""

    def __init__(self, pipe: int, main_thread: int) -> None:
        self._pipe = pipe
        self._main_thread = main_thread

    def __call__(self, _: int, frame: FrameType | None) -> None:
        if visit(frame):
            return
        main = _format_stack("Current thread", self._main_thread, frame)
        self._write(main)  # at once, so that the watcher sees it begin
        frames = sys._current_frames()
        # A variable that refers to this frame would keep the frame alive, with all frames and variables of the main thread.
        del frames[self._main_thread]
        others = [b"\n" + _format_stack("Thread", thread, innermost) for thread, innermost in frames.items()]
        self._write(b"".join(others)[: MAX_DUMP - len(main)] + STACKS_END)

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # the pipe is full or closed
            os.write(self._pipe, data)


def _format_stack(title: str, thread: int, frame: FrameType | None) -> bytes:
    head = f"{title} 0x{thread:016x} (most recent call first):\n"
    lines: list[str] = []
    while frame is not None and len(lines) < MAX_FRAMES:  # not walk_stack, in which a debugger would stop
        code = frame.f_code
        lines.append(f'  File "{_escape(code.co_filename)}", line {frame.f_lineno or 0} in {_escape(code.co_name)}\n')
        frame = frame.f_back
    return "".join([head, *lines]).encode()


def _escape(name: str) -> str:
    name = name[:MAX_NAME]
    return name if name.isprintable() else name.encode("unicode_escape").decode()
