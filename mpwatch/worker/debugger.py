"""Opens pdb in the terminal or the notebook of the caller. This module runs in a rank, in any thread.

    import pdb ---> debugger_hook.py ---> `route_pdb` changes pdb.Pdb: its input and output go over a socket to the watcher
    breakpoint(), pdb.set_trace(), torch.distributed.breakpoint() ---> pdb.Pdb ---> DebuggerClient ---> watcher/debugger/

With the message DEBUGGER, the rank sends a socket to the watcher. The body of the message DEBUGGER says what the socket is
for: "breakpoint", "post_mortem" or "inspector". The messages on the socket are tuples of builtin values, sent by a
multiprocessing Connection:

    rank to watcher     ("output", text)
                        ("prompt", text, can_be_left, thread, place)            the answer is one of the first three below;
                                                                                can_be_left: the user can leave the prompt,
                                                                                and the run goes on
                        ("completions", words)
                        ("quit",)                                               the watcher ends the run
                        ("left",)                                               pdb goes on, or the user has left pdb
    watcher to rank     ("line", text), ("end of file",), ("refused", reason), ("complete", text, line, begin, end)
                        ("ready",) or ("refused", reason)                       the first message on a new socket
                        ("inspect",)                                            the user wants to look at this rank

With debug="post_mortem", a rank has an inspector, which is a thread with a separate socket. The inspector shows the
main thread's stack to the user, even while the main thread runs or waits in C code.

If user code has passed `stdin` or `stdout` to a Pdb object, this module leaves the object unchanged. If a subclass of Pdb
has its own `cmdloop`, for example IPython's debugger, this module leaves the objects of the subclass unchanged. This module
does not replace `sys.breakpointhook`, so PYTHONBREAKPOINT and a hook that the user has set still work.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from functools import update_wrapper
from types import TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from types import FrameType
    from typing import Any

    from mpwatch.worker.channel import Channel

SKIPPED_MODULES = ("mpwatch", "mpwatch.*", "bdb")  # stepping does not stop there, see `finish_stepping`
IGNORE_HINT = "set PYTHONBREAKPOINT=0 to ignore breakpoints"
COMMANDS_OF_CONSOLE = {
    "ranks": "ranks: show where each rank is.",
    "rank": "rank N: go to the prompt of rank N, or show its stack if it is at no prompt.",
    "all": "all COMMAND: run the command in every rank that is at a prompt, such as `all n`, `all c` or `all p x`.",
}


_last_debugger: Any = None  # the Pdb that was used last


def finish_stepping() -> None:
    """Make pdb stop only at breakpoints from now on, even if the user has entered `step` or `next`."""
    if _last_debugger is not None:
        _last_debugger.set_continue()


class DebuggerClient:
    """Sends pdb's prompts and output to the watcher, and receives the user's lines.

    Args:
        channel: the channel to the watcher.
        pid: the rank's pid. This process may be a fork of the rank.
    """

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel = channel
        self._pid = pid
        self._connection: Connection | None = None
        # The lock is held while a Pdb interacts with the user. Other threads of the rank wait for it. It is reentrant, since
        # a signal handler may reach a breakpoint, too.
        self.lock = threading.RLock()

    def open(self, purpose: str = "breakpoint") -> None:
        """Connect to the watcher if there is no connection yet. Raises RuntimeError if the watcher cannot show a prompt."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "breakpoint() works in the rank itself, not in a process that the rank has forked, such as the worker of a "
                f"DataLoader (use num_workers=0); {IGNORE_HINT}"
            )
        with self.lock:
            if self._connection is None:
                self._connection = self._connect(purpose)

    def _connect(self, purpose: str) -> Connection:
        import socket
        from multiprocessing.connection import Connection

        from mpwatch.wire.messages import MessageKind

        ours, theirs = socket.socketpair()
        with theirs:
            is_sent = self._channel.send_socket(MessageKind.DEBUGGER, theirs.fileno(), purpose.encode())
        connection = Connection(ours.detach())
        try:
            kind, *reason = connection.recv() if is_sent else ("refused", "the rank is ending, or has closed its channel")
        except (EOFError, OSError):
            kind, *reason = "refused", "the run is ending"
        if kind == "refused":
            connection.close()
            raise RuntimeError(f"breakpoint() can open no prompt: {reason[0]}; {IGNORE_HINT}")
        return connection

    def write(self, text: str) -> None:
        """Show text in the caller's terminal or notebook."""
        self._send("output", text)

    def ask(self, prompt: str, debugger: Any, *, can_be_left: bool = False) -> str:
        """Show a prompt in the caller's terminal or notebook, and return the line that the user enters.

        At the end of the input, for example after Ctrl-D, return an empty string.
        """
        thread = threading.current_thread()
        name = "" if thread is threading.main_thread() else thread.name
        frame = debugger.curframe if debugger is not None else None
        place = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame is not None else None
        with self.lock:
            self._send("prompt", prompt, can_be_left, name, place)
            while True:
                kind, *values = self._receive()
                if kind == "complete":
                    self._send("completions", _complete(debugger, *values))
                elif kind == "refused":
                    raise RuntimeError(f"breakpoint() can open no prompt: {values[0]}; {IGNORE_HINT}")
                elif kind != "inspect":  # the user has asked again, since the first request took long
                    return f"{values[0]}\n" if kind == "line" else ""

    def wait_for_request(self) -> None:
        """Wait until the user asks to see the stack of this rank."""
        self.open("inspector")
        self._receive()

    def leave(self) -> None:
        """Report to the watcher that pdb has left its prompt."""
        self._send("left")

    def quit(self) -> None:
        """Ask the watcher to end the run, and wait until the watcher stops this rank."""
        self._send("quit")
        _wait_for_end()

    def _send(self, *message: object) -> None:
        self.open()
        assert self._connection is not None
        try:
            self._connection.send(message)
        except OSError:
            _wait_for_end()

    def _receive(self) -> Any:
        assert self._connection is not None
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            _wait_for_end()


def _wait_for_end() -> None:
    """Wait until the watcher stops this rank, or until the rank's handler for SIGTERM raises an exception."""
    while True:
        threading.Event().wait()


class PromptStream:
    """The stdin and stdout of one Pdb object."""

    encoding = "utf-8"

    def __init__(self, client: DebuggerClient, debugger: Any) -> None:
        self.client = client
        self.can_be_left = False  # whether the run goes on when the user leaves the prompt
        self._debugger = debugger
        self._unfinished_line = ""  # the prompt, when pdb reads a line

    def write(self, text: str) -> int:
        """Show the complete lines of the text.

        Keep an unfinished line until another `write` completes the line, or until `readline` shows the line as its prompt.
        """
        lines, newline, self._unfinished_line = (self._unfinished_line + text).rpartition("\n")
        if newline:
            self.client.write(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Do nothing, because `write` has already sent all complete lines."""

    def isatty(self) -> bool:
        """Return False, so that pdb writes no escape sequences."""
        return False

    def readline(self) -> str:
        """Return a line that the user enters. At the end of the input, for example after Ctrl-D, return an empty string."""
        prompt, self._unfinished_line = self._unfinished_line, ""
        return self.client.ask(prompt, self._debugger, can_be_left=self.can_be_left)


def route_pdb(module: Any, client: DebuggerClient) -> None:
    """Make Pdb objects read and write through the watcher."""
    import code
    from cmd import Cmd

    cls = module.Pdb
    users = threading.local()  # its attribute `client` is the client that the thread has used last

    def get_stream(debugger: Any) -> PromptStream | None:
        stream = getattr(debugger, "stdin", None)
        return stream if isinstance(stream, PromptStream) else None

    originals = {
        name: getattr(cls, name) for name in ("__init__", "set_trace", "interaction", "get_stack", "set_quit", "do_run")
    }

    def initialize(
        self: Any, completekey: str = "tab", stdin: Any = None, stdout: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        originals["__init__"](self, completekey, stdin, stdout, *args, **kwargs)
        if stdin is None and stdout is None and type(self).cmdloop is Cmd.cmdloop:
            self.stdin = self.stdout = PromptStream(client, self)
            self.use_rawinput = 0
            self.nosigint = True  # otherwise `continue` sets a handler that opens a prompt when the watcher sends SIGINT
            self.skip = {*(self.skip or ()), *SKIPPED_MODULES}
            self.mode = None  # Python 3.14: `quit` must not ask whether to kill the process

    def set_trace(self: Any, frame: FrameType | None = None, **kwargs: Any) -> None:
        global _last_debugger
        if get_stream(self) is not None:
            client.open()
            _last_debugger = self
        originals["set_trace"](self, frame or sys._getframe(1), **kwargs)

    def interaction(self: Any, frame: FrameType | None, trace: Any) -> None:
        if (stream := get_stream(self)) is None:
            originals["interaction"](self, frame, trace)
            return
        with stream.client.lock:
            stream.client.open()
            stream.can_be_left = trace is not None or stream.client is not client
            users.client = stream.client
            originals["interaction"](self, frame, trace)
            stream.client.leave()

    def get_stack(self: Any, frame: FrameType | None, trace: Any) -> tuple[list[tuple[FrameType, int]], int]:
        stack, current = originals["get_stack"](self, frame, trace)
        if (stream := get_stream(self)) is None:
            return stack, current
        count = _count_outer_frames(stack)
        stack, current = stack[count:], current - count
        return stack, _find_user_frame(stack) if stream.can_be_left else current

    def set_quit(self: Any) -> None:
        if (stream := get_stream(self)) is not None and not stream.can_be_left:
            client.quit()
        originals["set_quit"](self)

    def restart(self: Any, arg: str) -> Any:
        if get_stream(self) is None:
            return originals["do_run"](self, arg)
        self.error("a rank cannot be restarted from its debugger; q ends the run")
        return None

    def ask(prompt: object = "") -> str:
        line = getattr(users, "client", client).ask(str(prompt), None, can_be_left=True)
        if not line:
            raise EOFError
        return line[:-1]

    replacements: dict[str, Any] = {
        "__init__": initialize,
        "set_trace": set_trace,
        "interaction": interaction,
        "get_stack": get_stack,
        "set_quit": set_quit,
        "do_run": restart,
    }
    cls.do_restart = restart
    for command, text in COMMANDS_OF_CONSOLE.items():  # no `do_...`: the name alone may be that of a variable
        setattr(cls, f"help_{command}", _make_help(text))
    for name, method in replacements.items():
        setattr(cls, name, update_wrapper(method, originals[name]))
    # The modules pdb (to confirm) and code (for `interact`) call the builtin `input`, which would read the rank's own stdin.
    module.input = ask
    code.input = ask  # type: ignore[attr-defined]


def _make_help(text: str) -> Callable[[Any], None]:
    def print_help(self: Any) -> None:
        self.message(text)

    return print_help


def _count_outer_frames(stack: list[tuple[FrameType, int]]) -> int:
    """Count the frames of multiprocessing and mpwatch that come before the first frame of the user's function."""
    is_of_mpwatch = [str(frame.f_globals.get("__name__", "")).startswith("mpwatch.") for frame, _ in stack]
    if True not in is_of_mpwatch:
        return 0
    first = is_of_mpwatch.index(True)
    return next((number for number in range(first, len(stack)) if not is_of_mpwatch[number]), 0)


def _find_user_frame(stack: list[tuple[FrameType, int]]) -> int:
    """Return the index of the innermost frame of user code. `stack` begins with the outermost frame."""
    from mpwatch.results.places import find_user_frame

    files = [frame.f_code.co_filename for frame, _ in reversed(stack)]
    return len(stack) - 1 - find_user_frame(files) if files else 0


def open_post_mortem(error: Exception) -> None:
    """Show a prompt of pdb in the frame that has raised the exception, and wait until the user leaves the prompt."""
    import bdb
    import pdb  # noqa: T100  this is what the option asks for

    if isinstance(error, bdb.BdbQuit):
        return
    debugger = pdb.Pdb()
    if not isinstance(debugger.stdout, PromptStream):  # pdb was replaced
        return
    trace: Any = error if sys.version_info >= (3, 13) else error.__traceback__  # newer ones have the command `exceptions`
    with suppress(RuntimeError, _StopError), _raised_at_sigterm():  # RuntimeError: the caller can show no prompt
        debugger.stdout.client.open("post_mortem")
        debugger.stdout.write(f"the rank has raised {_describe(error)}\n")
        debugger.reset()
        debugger.interaction(None, trace)


class _StopError(BaseException):
    """Raised if the watcher stops this rank while the user looks at the rank's exception in pdb."""


@contextmanager
def _raised_at_sigterm() -> Iterator[None]:
    """Make SIGTERM raise _StopError. _StopError ends the prompt, and the rank reports the exception of its function.

    If the user's function has set a handler of SIGTERM, do not replace this handler.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_stop(*_: object) -> None:
    raise _StopError


def _describe(error: Exception) -> str:
    from mpwatch.results.failure import summarize_exception

    return summarize_exception(error)


def start_inspector(channel: Channel) -> None:
    """Start the thread that shows the main thread's stack to the user."""
    client = DebuggerClient(channel, os.getpid())
    threading.Thread(target=_run_inspector, args=(client,), name="mpwatch-inspector", daemon=True).start()


def _run_inspector(client: DebuggerClient) -> None:
    main_thread = threading.main_thread().ident
    while True:
        try:
            client.wait_for_request()
        except RuntimeError:  # the caller can show no prompt
            return
        import pdb  # noqa: T100  this is what the user asks for

        debugger: Any = pdb.Pdb()
        debugger.stdin = debugger.stdout = PromptStream(client, debugger)
        debugger.use_rawinput = 0
        debugger.reset()
        frame = sys._current_frames().get(main_thread or 0)
        with suppress(Exception):  # the user's objects may raise anything
            debugger.interaction(frame, None)
        sys.settrace(None)


def drop_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback. If this module has raised the exception, leave out the frames of the debugger.

    For example, `breakpoint()` raises RuntimeError in this module if the watcher cannot show a prompt.
    """
    entries = []
    rest = trace
    while rest is not None:
        entries.append(rest)
        rest = rest.tb_next
    modules = [entry.tb_frame.f_globals.get("__name__") for entry in entries]
    if modules[-1:] != [__name__]:
        return trace
    first = min(modules.index(name) for name in ("pdb", __name__) if name in modules)
    copy = None
    for entry in reversed(entries[:first]):
        copy = TracebackType(copy, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return copy


def _complete(debugger: Any, text: str, line: str, begin: int, end: int) -> list[str]:
    """Return the completions of a word, in the same way as `cmd.Cmd.complete`. `line` must not begin with blanks."""
    try:
        complete = debugger.completenames
        if begin > 0:
            command = debugger.parseline(line)[0]
            complete = getattr(debugger, f"complete_{command}", debugger.completedefault)
        return [str(word) for word in complete(text, line, begin, end)]
    except Exception:  # noqa: BLE001  code of the user's objects may raise; a completion is not worth a message
        return []
