"""Writes stacks into the rank's stack pipe: of a crash, and of all threads when the watcher asks for them. Runs in a rank.

The watcher asks in two ways, because each fails where the other works:

- PYTHON_DUMP_SIGNAL has a handler in Python. It runs between two bytecodes of the main thread, so it sees whole stacks. It
  does not run while the main thread waits or computes in C code.
- NATIVE_DUMP_SIGNAL has faulthandler's handler, in C. It runs at once, whatever the interpreter is doing and whichever
  thread holds the GIL. But a thread that enters or leaves a function at this moment has an invalid frame. Python 3.11 to
  3.13 may crash on it (with `sorted(key=function)` in 0.3 % to 6 % of the dumps). Python 3.14 leaves out the rest of the
  stack (4 %).

Neither ever blocks: threads that do not fit into the pipe are left out.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from contextlib import suppress

from mpwatch.os_support.signals import NATIVE_DUMP_SIGNAL, PYTHON_DUMP_SIGNAL, set_handler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

MAX_FRAMES = 100  # of a thread, as in faulthandler
MAX_BYTES = 1 << 16  # the room in a pipe, unless its user has very many


def register_stack_dumps(pipe: int) -> int:
    """Write all stack dumps into this pipe. Return the identifier of the main thread, which is in the dumps.

    faulthandler writes the stack of the crashed thread on SIGSEGV, SIGFPE, SIGABRT, SIGBUS and SIGILL. If the function
    enables faulthandler itself, the stack of a crash goes where the function wants it.
    """
    main_thread = threading.get_ident()
    os.set_blocking(pipe, False)
    faulthandler.enable(file=pipe, all_threads=False)
    if NATIVE_DUMP_SIGNAL is not None:
        faulthandler.register(NATIVE_DUMP_SIGNAL, file=pipe, all_threads=True)
    if PYTHON_DUMP_SIGNAL is not None:
        set_handler(PYTHON_DUMP_SIGNAL, lambda _, frame: _write_stacks(pipe, main_thread, frame))
    status = os.fstat(pipe)
    os.register_at_fork(after_in_child=lambda: _discard_dumps(pipe, status))
    return main_thread


def _write_stacks(pipe: int, main_thread: int, frame: FrameType | None) -> None:
    """Write the stacks of all threads in faulthandler's format, with the main thread last. `frame` is its innermost one."""
    with suppress(OSError, MemoryError, RecursionError):
        stacks = _format_stack("Current thread", main_thread, frame)
        for thread, other in sys._current_frames().items():
            stack = _format_stack("Thread", thread, other) + b"\n"
            if thread != main_thread and len(stack) + len(stacks) <= MAX_BYTES:
                stacks = stack + stacks
        os.write(pipe, stacks)


def _format_stack(title: str, thread: int, frame: FrameType | None) -> bytes:
    lines = [f"{title} 0x{thread:016x} (most recent call first):\n"]
    while frame is not None and len(lines) <= MAX_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{_escape(code.co_filename)}", line {frame.f_lineno or 0} in {_escape(code.co_name)}\n')
        frame = frame.f_back
    return "".join(lines).encode()


def _escape(name: str) -> str:
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _discard_dumps(pipe: int, status: os.stat_result) -> None:
    """Discard stack dumps in a forked child of the rank: a crash of the child is not a crash of the rank."""
    with suppress(OSError):  # closed, or the limit of open files is reached
        if os.path.samestat(os.fstat(pipe), status):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, pipe, inheritable=False)
            os.close(null)
