"""Reads a line from the user, in a terminal or in a notebook. Runs in the main thread of the calling program.

Python's `input` works in both: IPython's kernel replaces it, and in a terminal it uses the module readline. While it waits,
another thread watches the rank's socket. If the rank ends, this thread sends SIGURG, whose handler raises PromptClosedError.
A process ignores SIGURG by default, so a late one has no effect.
"""

import select
import signal
import sys
import threading
from contextlib import ExitStack, closing, suppress
from typing import NoReturn

from mpwatch.options.log_spec import in_notebook
from mpwatch.watcher.wakeup_pipe import WakeupPipe
from mpwatch.wire.exceptions.source_lines import get_ipython_shell

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


def read_line(prompt: str, socket: int) -> str:
    """Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C, PromptClosedError if the rank closes its end."""
    with ExitStack() as stack:
        handler = signal.signal(signal.SIGURG, _close_prompt)
        stack.callback(signal.signal, signal.SIGURG, signal.SIG_DFL if handler is None else handler)
        stop = stack.enter_context(closing(WakeupPipe()))
        arguments = (socket, stop.fileno(), threading.get_ident())
        thread = threading.Thread(target=_watch_socket, args=arguments, name="mpwatch-prompt", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.wake)
        return input(prompt)


def _close_prompt(*_: object) -> NoReturn:
    raise PromptClosedError


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
