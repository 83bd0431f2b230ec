"""Opens pdb in the terminal or the notebook of the caller. This module runs in a rank, in any thread.

    breakpoint(), pdb.set_trace(), torch.distributed.breakpoint() ---> RankPdb ---> Prompt ---> watcher/debugger/

The rank sends a socket to the watcher (DEBUGGER), and talks over it with a multiprocessing Connection:

    rank to watcher     (text, can_be_left, thread, place): what pdb has written; the last line is the prompt
    watcher to rank     a line, or "" at the end of the input, as `readline` returns it; (reason,) if there can be no prompt

Objects of Pdb with streams of the user's own, and subclasses with their own `cmdloop` such as IPython's, stay as they are.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

from mpwatch.wire.messages import PDB_PROMPT, MessageKind
from mpwatch.worker import stack_dumps
from mpwatch.worker.import_hook import ModuleFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from types import FrameType
    from typing import Any, NoReturn

    from mpwatch.wire.shared_memory import RankSlot
    from mpwatch.worker.channel import Channel

SKIPPED_MODULES = ("mpwatch", "mpwatch.*", "bdb")  # stepping does not stop there, see `finish_stepping`
IGNORE_HINT = "set PYTHONBREAKPOINT=0 to ignore breakpoints"

_is_post_mortem = False  # whether a prompt opens if the rank's function raises
_last_debugger: Any = None  # the RankPdb that was used last


def install(channel: Channel, slot: RankSlot, *, post_mortem: bool) -> None:
    """Connect pdb with the watcher as soon as this rank imports pdb."""
    global _is_post_mortem
    _is_post_mortem = post_mortem
    prompt = Prompt(channel, os.getpid())
    ModuleFinder("pdb", lambda module: route_pdb(module, prompt)).install()
    stack_dumps.visit = lambda frame: _open_visit(slot, prompt, frame)


def _open_visit(slot: RankSlot, prompt: Prompt, frame: FrameType | None) -> bool:
    """If another program asks for a prompt (Job.debug), open it at the next line after this signal handler, unless this
    thread is at a prompt, or may be sending something. Return whether one was asked for.
    """
    if not slot.take_visit():
        return False
    import pdb  # noqa: T100  this is what the visitor asks for

    debugger: Any = pdb.Pdb()
    if debugger.stdin is not prompt or prompt.is_asking or prompt.channel.is_busy or os.getpid() != prompt.pid:
        return True
    prompt.is_visited = True
    if prompt.connection is not None:
        prompt.connection.close()
        prompt.connection = None
    try:  # no `suppress`, in which the debugger would stop
        debugger.set_trace(frame)
    except RuntimeError:  # the channel is closed
        return True
    return True


def finish_stepping() -> None:
    """When the user's function has ended, keep pdb from stepping through the code that the rank runs then."""
    if _last_debugger is not None:
        _last_debugger.set_continue()


class Prompt:
    """The stdin and stdout of all Pdb objects of this rank: one of them interacts with the user at a time."""

    encoding = "utf-8"

    def __init__(self, channel: Channel, pid: int) -> None:
        self.channel = channel
        self.pid = pid  # this process may be a fork of the rank
        self.connection: Connection | None = None
        self._text = ""  # written since the last prompt
        self.lock = threading.RLock()  # held by the thread that interacts
        self.debugger: Any = None  # that interacts
        self.can_be_left = False  # whether the run goes on when the user leaves the prompt
        self.is_asking = False
        self.is_visited = False  # by another program, which may end at any time

    def open(self) -> None:
        """Connect to the watcher if necessary. Raises RuntimeError if that is not possible."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                "breakpoint() works in the rank itself, not in a process that the rank has forked, such as the worker of a "
                f"DataLoader (use num_workers=0); {IGNORE_HINT}"
            )
        import socket
        from multiprocessing.connection import Connection

        with self.lock:
            if self.connection is None:
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    why = b"visit" if self.is_visited else b""
                    if not self.channel.send(MessageKind.DEBUGGER, why, fd=theirs.fileno()):
                        _refuse("the rank is ending, or has closed its channel")
                    self.connection = Connection(ours.detach())

    def write(self, text: str) -> int:
        self._text += text
        return len(text)

    def flush(self) -> None:
        """Do nothing, because the next prompt sends the text."""

    def isatty(self) -> bool:
        return False  # so that pdb writes no escape sequences

    def readline(self) -> str:
        """Return the line that the user enters at the prompt, or "" at the end of the input, as after Ctrl-D."""
        return self._ask("", self.debugger, can_be_left=self.can_be_left)

    def input(self, text: object = "") -> str:
        """Replace `input` where pdb (to confirm) and code (for `interact`) would read the rank's own stdin."""
        line = self._ask(str(text), None, can_be_left=True)
        if not line:
            raise EOFError
        return line[:-1]

    def _ask(self, question: str, debugger: Any, *, can_be_left: bool) -> str:
        thread = threading.current_thread()
        name = "" if thread is threading.main_thread() else thread.name
        frame = debugger.curframe if debugger is not None else None
        place = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame is not None else None
        with self.lock:
            self.open()
            assert self.connection is not None
            text, self._text = self._text + question, ""
            self.is_asking = True
            try:
                self.connection.send((text, can_be_left, name, place))
                answer = self.connection.recv()
            except (EOFError, OSError):
                if not self.is_visited:
                    _wait_for_end()
                self.connection.close()
                if not text.endswith(PDB_PROMPT):  # end `interact`, a question or the like; the next prompt comes here, too
                    return ""
                self.is_visited = False
                self.connection = None
                self.debugger.clear_all_breaks()
                return "continue\n"
            finally:
                self.is_asking = False
        return answer if isinstance(answer, str) else _refuse(*answer)


def _refuse(reason: str) -> NoReturn:
    raise RuntimeError(f"breakpoint() can open no prompt: {reason}; {IGNORE_HINT}")


def _wait_for_end() -> NoReturn:
    """Wait until the watcher stops this rank, or until the rank's handler for SIGTERM raises an exception."""
    while True:
        threading.Event().wait()


def route_pdb(module: Any, prompt: Prompt) -> None:
    import code
    from cmd import Cmd

    class RankPdb(module.Pdb):  # type: ignore[misc]
        def __init__(self, completekey: str = "tab", stdin: Any = None, stdout: Any = None, *args: Any, **more: Any) -> None:
            super().__init__(completekey, stdin, stdout, *args, **more)
            if stdin is None and stdout is None and type(self).cmdloop is Cmd.cmdloop:
                self.stdin = self.stdout = prompt
                self.use_rawinput = 0
                self.nosigint = True  # else `continue` sets a handler that opens a prompt when the watcher sends SIGINT
                self.skip: set[str] = {*(getattr(self, "skip", None) or ()), *SKIPPED_MODULES}
                self.mode = None  # Python 3.14: `quit` must not ask whether to kill the process

        def set_trace(self, frame: FrameType | None = None, **more: Any) -> None:
            global _last_debugger
            if self.stdin is prompt:
                prompt.open()
                _last_debugger = self
            super().set_trace(frame or sys._getframe(1), **more)

        def interaction(self, frame: FrameType | None, trace: Any) -> None:
            if self.stdin is not prompt:
                super().interaction(frame, trace)
                return
            with prompt.lock:
                prompt.open()
                prompt.debugger, prompt.can_be_left = self, trace is not None
                super().interaction(frame, trace)

        def get_stack(self, frame: FrameType | None, trace: Any) -> tuple[list[tuple[FrameType, int]], int]:
            stack, current = super().get_stack(frame, trace)
            if self.stdin is not prompt:
                return stack, current
            count = _count_outer_frames(stack)
            return stack[count:], _find_user_frame(stack[count:]) if prompt.can_be_left else current - count

    module.Pdb = RankPdb
    module.input = code.input = prompt.input  # type: ignore[attr-defined]


def _count_outer_frames(stack: list[tuple[FrameType, int]]) -> int:
    """Count the frames of multiprocessing and mpwatch that come before the first frame of the user's function."""
    is_of_mpwatch = [str(frame.f_globals.get("__name__", "")).startswith("mpwatch.") for frame, _ in stack]
    if True not in is_of_mpwatch:
        return 0
    first = is_of_mpwatch.index(True)
    return next((number for number in range(first, len(stack)) if not is_of_mpwatch[number]), 0)


def _find_user_frame(stack: list[tuple[FrameType, int]]) -> int:
    from mpwatch.results.places import find_user_frame

    files = [frame.f_code.co_filename for frame, _ in reversed(stack)]
    return len(stack) - 1 - find_user_frame(files) if files else 0


def open_post_mortem(error: Exception) -> None:
    """If debug="post_mortem" is set, show a prompt where the exception was raised."""
    if not _is_post_mortem:
        return
    import bdb
    import pdb  # noqa: T100  this is what the option asks for

    debugger = pdb.Pdb()
    if isinstance(error, bdb.BdbQuit) or not isinstance(debugger.stdout, Prompt):  # pdb was replaced
        return
    from mpwatch.results.failure import summarize_exception

    trace: Any = error if sys.version_info >= (3, 13) else error.__traceback__  # newer ones have the command `exceptions`
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # the user's own handler stays
    with suppress(RuntimeError, _StopError):  # RuntimeError: from `open`
        try:
            if is_default:
                signal.signal(signal.SIGTERM, _raise_stop)
            debugger.stdout.open()
            debugger.stdout.write(f"the rank has raised {summarize_exception(error)}\n")
            debugger.reset()
            debugger.interaction(None, trace)
        finally:
            if is_default:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _StopError(BaseException):
    """The watcher stops this rank while the user looks at its exception, which the rank reports then."""


def _raise_stop(*_: object) -> None:
    raise _StopError
