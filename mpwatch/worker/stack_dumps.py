"""Writes stacks into the rank's stack pipe after a crash, and when the watcher asks for them. This module runs in a rank.

The watcher asks by one of two signals, and neither handler blocks: if the pipe is full, the rest of the stacks is lost.

- PYTHON_DUMP_SIGNAL comes first. Its handler in Python writes the stacks of all threads. It does not run while the main
  thread computes in C code, or in some waits, such as a collective of gloo.
- For NATIVE_DUMP_SIGNAL, faulthandler installs a handler in C, which runs at once, and writes only the main thread's stack.
  While a thread enters or leaves a function, its frame is invalid for a moment. In a test with `sorted(key=function)`, up to
  6 % of these dumps crashed Python 3.11 to 3.13, and 4 % of those of Python 3.14 lacked callers.

PYTHON_DUMP_SIGNAL can interrupt a system call of a C library, which fails with EINTR, and a tracer (`sys.settrace`) sees the
frames of its handler.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections import deque
from contextlib import suppress

from mpwatch.os_support.signals import NATIVE_DUMP_SIGNAL, PYTHON_DUMP_SIGNAL, set_handler
from mpwatch.wire.messages import OTHER_THREADS_HEAD, STACKS_END

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from types import FrameType
    from typing import Any

INNERMOST_FRAMES, OUTERMOST_FRAMES = 80, 20  # of a thread. faulthandler writes the 100 innermost frames
MAX_NAME = 500  # characters, as in faulthandler
MAX_BYTES = 1 << 16  # the room in a pipe, unless its user has very many pipes
LEFT_OUT_STACKS = f"\n{OTHER_THREADS_HEAD}\n  (their stacks are left out: all stacks together exceed 64 KiB)\n".encode()

c_enable = faulthandler.enable
_crash_fd: int  # where faulthandler writes the stack of a crash
_has_own_file = False  # whether the function has chosen another file


def register_stack_dumps(pipe: int) -> int:
    """Make this rank write its stack dumps into this pipe. Return the identifier of the main thread. If the function passes
    a file to `faulthandler.enable`, the stack of a crash goes there.
    """
    main_thread = threading.get_ident()
    os.set_blocking(pipe, False)
    faulthandler.enable = _enable_for_user
    _enable_crash_stack(pipe)
    if NATIVE_DUMP_SIGNAL is not None:
        faulthandler.register(NATIVE_DUMP_SIGNAL, file=pipe, all_threads=False)
    if PYTHON_DUMP_SIGNAL is not None:
        set_handler(PYTHON_DUMP_SIGNAL, StackWriter(pipe, main_thread))
    status = os.fstat(pipe)
    os.register_at_fork(after_in_child=lambda: _discard_dumps(pipe, status))
    return main_thread


def redirect_crash_stack(target: socket.socket) -> None:
    """Make faulthandler write the stack of a crash into this socket, unless the function has chosen another file."""
    if not _has_own_file:
        fd = target.detach()
        status = os.fstat(fd)
        _enable_crash_stack(fd)
        os.register_at_fork(after_in_child=lambda: _discard_dumps(fd, status))


def _enable_crash_stack(fd: int) -> None:
    global _crash_fd
    _crash_fd = fd
    c_enable(file=fd, all_threads=False)


def _enable_for_user(file: Any = None, *args: Any, **options: Any) -> None:
    """Replace `faulthandler.enable`: the stack of a crash that would go to stderr goes to the watcher, for its report."""
    global _has_own_file
    _has_own_file = file is not None and file is not sys.stderr
    if _has_own_file:
        c_enable(file, *args, **options)
    else:
        _enable_crash_stack(_crash_fd)


class StackWriter:
    """The handler of PYTHON_DUMP_SIGNAL, which writes the stacks of all threads in faulthandler's format.

    The main thread comes first. The middle of a deep stack is left out: the outermost frames show whether the rank is
    loading its call.
    """

    def __init__(self, pipe: int, main_thread: int) -> None:
        self._pipe = pipe
        self._main_thread = main_thread

    def __call__(self, _: int, frame: FrameType | None) -> None:
        stack = _format_stack("Current thread", self._main_thread, frame)
        self._write(stack)  # at once: the watcher sees that the answer has begun
        room = MAX_BYTES - len(stack) - len(LEFT_OUT_STACKS) - len(STACKS_END)
        others = []
        frames = sys._current_frames()
        # A variable that refers to this frame would keep the frame alive, with all frames and variables of the main thread.
        del frames[self._main_thread]
        for thread, innermost in frames.items():
            stack = b"\n" + _format_stack("Thread", thread, innermost)
            room -= len(stack)
            if room < 0:
                others.append(LEFT_OUT_STACKS)
                break
            others.append(stack)
        self._write(b"".join(others) + STACKS_END)

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # the pipe is full or closed
            os.write(self._pipe, data)


def _format_stack(title: str, thread: int, frame: FrameType | None) -> bytes:
    innermost: list[FrameType] = []
    outermost: deque[FrameType] = deque(maxlen=OUTERMOST_FRAMES)
    count = 0
    while frame is not None:
        kept: list[FrameType] | deque[FrameType] = innermost if count < INNERMOST_FRAMES else outermost
        kept.append(frame)
        frame, count = frame.f_back, count + 1
    gap = ["  ...\n"] if count > INNERMOST_FRAMES + OUTERMOST_FRAMES else []
    head = f"{title} 0x{thread:016x} (most recent call first):\n"
    return "".join([head, *map(_format_frame, innermost), *gap, *map(_format_frame, outermost)]).encode()


def _format_frame(frame: FrameType) -> str:
    return f'  File "{_escape(frame.f_code.co_filename)}", line {frame.f_lineno or 0} in {_escape(frame.f_code.co_name)}\n'


def _escape(name: str) -> str:
    name = name[:MAX_NAME]
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _discard_dumps(pipe: int, status: os.stat_result) -> None:
    """Discard stack dumps in a forked child of the rank, because a crash of the child is not a crash of the rank."""
    faulthandler.enable = c_enable
    with suppress(OSError):  # closed, or the limit of open files is reached
        if os.path.samestat(os.fstat(pipe), status):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, pipe, inheritable=False)
            os.close(null)
