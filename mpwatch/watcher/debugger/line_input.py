"""Reads a line from the user, in a terminal or in a notebook. Runs in the main thread of the calling program.

Python's `input` works in both: IPython's kernel replaces it, and in a terminal it uses the module readline. While it waits,
another thread watches the rank's socket. If the rank ends, this thread sends SIGURG, whose handler raises PromptClosedError.
A process ignores SIGURG by default, so a late one has no effect.
"""

import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

from mpwatch.options.log_spec import in_notebook
from mpwatch.watcher.wakeup_pipe import WakeupPipe
from mpwatch.wire.exceptions.source_lines import get_ipython_shell

Complete = Callable[[str, str, int, int], list[str]]  # the word, the line, and where in the line the word begins and ends
DELIMITERS = " \t\n`@#%^&*()=+[{]}\\|;:'\",<>?"  # of words, for completion; pdb has the same
REPEAT_MS = 50


class PromptClosedError(BaseException):
    """The rank has ended while its prompt is open. (IPython's kernel would log and ignore a subclass of Exception.)"""


def explain_missing_prompt() -> str:
    """Return the reason why this process cannot show a prompt, or an empty text if it can show a prompt."""
    if threading.current_thread() is not threading.main_thread():
        return "the run was started in a thread that is not the main thread of its program"
    if in_notebook():
        kernel = get_ipython_shell().kernel
        return "" if getattr(kernel, "_allow_stdin", True) else "this notebook is executed without a user"
    with suppress(Exception):  # stdin is None, closed, or an object of the calling program
        if sys.stdin.isatty():
            return ""
    return "the program that started the run has neither a terminal on stdin nor a notebook"


def read_line(prompt: str, socket: int, complete: Complete) -> str:
    """Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C, PromptClosedError if the rank closes its end."""
    is_reading = False

    def close_prompt(*_: object) -> None:
        nonlocal is_reading
        if is_reading:
            is_reading = False
            raise PromptClosedError

    with ExitStack() as stack:
        handler = signal.signal(signal.SIGURG, close_prompt)
        stack.callback(signal.signal, signal.SIGURG, signal.SIG_DFL if handler is None else handler)
        stop = stack.enter_context(closing(WakeupPipe()))
        arguments = (socket, stop.fileno(), threading.get_ident())
        thread = threading.Thread(target=_watch_socket, args=arguments, name="mpwatch-prompt", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.wake)
        if not in_notebook():
            stack.enter_context(_own_completer(complete))
        try:
            is_reading = True
            return input(prompt)
        finally:
            is_reading = False


def _watch_socket(socket: int, stop: int, main_thread: int) -> None:
    """When the rank's end of the socket is closed, send SIGURG to the main thread again and again until `read_line` ends."""
    poll = select.poll()
    poll.register(socket, 0)  # nothing but the end
    poll.register(stop, select.POLLIN)
    if any(fd == stop for fd, _ in poll.poll()):
        return
    poll.unregister(socket)
    while not poll.poll(REPEAT_MS):  # repeat the signal, since the main thread may not wait in `input` yet
        signal.pthread_kill(main_thread, signal.SIGURG)


@contextmanager
def _own_completer(complete: Complete) -> Iterator[None]:
    try:
        import readline
    except ImportError:  # a Python without it
        yield
        return
    words: list[str] = []

    def complete_next(text: str, state: int) -> Any:
        if state == 0:
            full = readline.get_line_buffer()
            line = full.lstrip()
            blanks = len(full) - len(line)
            words[:] = complete(text, line, readline.get_begidx() - blanks, readline.get_endidx() - blanks)
        return words[state] if state < len(words) else None

    completer, delimiters = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer(complete_next)
    readline.set_completer_delims(DELIMITERS)
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(completer)
        readline.set_completer_delims(delimiters)
