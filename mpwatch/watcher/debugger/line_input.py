"""Read a line from the user, in a terminal or in a notebook. This module runs in the main thread of the calling program.

Python's `input` also works in a notebook, because IPython's kernel replaces `input` with its own function. In a terminal,
`input` uses the readline module, if Python has this module. While `input` waits for the user, another thread watches the
rank's socket. If the rank ends, the watching thread sends SIGURG to the main thread, and the handler of SIGURG raises
PromptClosedError. A process ignores SIGURG by default, so a late SIGURG has no effect.
"""

import select
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from types import ModuleType
from typing import Self

from mpwatch.options.log_spec import in_notebook
from mpwatch.watcher.wakeup_pipe import WakeupPipe
from mpwatch.wire.exceptions.source_lines import get_ipython_shell

try:
    import readline as _readline
except ImportError:  # a Python without it
    _readline = None  # type: ignore[assignment]

Complete = Callable[[str, str, int, int], list[str]]  # the word, the line, and where in the line the word begins and ends
DELIMITERS = " \t\n`@#%^&*()=+[{]}\\|;:'\",<>?"  # of words, for completion; pdb has the same
REPEAT_MS = 50


class PromptClosedError(BaseException):
    """Raised when a rank ends while the prompt of its debugger is open.

    PromptClosedError is no subclass of Exception, because IPython's kernel would log and ignore a subclass of Exception.
    """


def explain_missing_prompt() -> str:
    """Return the reason why this process cannot show a prompt, or an empty text if it can show a prompt."""
    if threading.current_thread() is not threading.main_thread():
        return "the run was started in a thread that is not the main thread of its program"
    if in_notebook():
        kernel = get_ipython_shell().kernel
        return "" if getattr(kernel, "_allow_stdin", True) else "this notebook is executed without a user"
    try:
        is_terminal = sys.stdin.isatty()
    except Exception:  # noqa: BLE001  None, closed, or an object that the calling program has put there
        is_terminal = False
    return "" if is_terminal else "the program that started the run has neither a terminal on stdin nor a notebook"


class LineInput:
    """A context manager that reads the user's input at debugger prompts.

    Args:
        history: the lines that the user entered in earlier interactions.
    """

    def __init__(self, history: list[str]) -> None:
        self._history = history
        self._readline = _readline if not in_notebook() else None
        self._is_reading = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._readline is not None:
                stack.enter_context(_own_history(self._readline, self._history))
            stack.enter_context(self._terminal_modes())
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def read(self, prompt: str, socket: int, complete: Complete) -> str:
        """Read one line from the user, and return this line without its newline.

        Raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C. Raises PromptClosedError if the rank's end of the socket
        is closed.
        """
        with ExitStack() as stack:
            handler = signal.signal(signal.SIGURG, self._close_prompt)
            stack.callback(signal.signal, signal.SIGURG, signal.SIG_DFL if handler is None else handler)
            stop = stack.enter_context(closing(WakeupPipe()))
            arguments = (socket, stop.fileno(), threading.get_ident())
            thread = threading.Thread(target=_watch_socket, args=arguments, name="mpwatch-prompt", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(stop.wake)
            if self._readline is not None:
                stack.enter_context(_own_completer(self._readline, complete))
            try:
                self._is_reading = True
                line = input(prompt)
            except SystemError as error:  # CPython may run a signal handler in a function of C, and then raises this
                if isinstance(error.__cause__, KeyboardInterrupt | PromptClosedError):
                    raise error.__cause__ from None
                raise
            finally:
                self._is_reading = False
        if line.strip() and (not self._history or self._history[-1] != line):
            self._history.append(line)
        return line

    def _close_prompt(self, *_: object) -> None:
        """The handler of SIGURG, which raises PromptClosedError if `input` is waiting for the user."""
        if self._is_reading:
            self._is_reading = False
            raise PromptClosedError

    @contextmanager
    def _terminal_modes(self) -> Iterator[None]:
        """Restore the modes of the terminal when the `with` block ends."""
        try:
            fd = sys.stdin.fileno()
            modes = termios.tcgetattr(fd)
        except Exception:  # noqa: BLE001  no terminal, but a notebook
            yield
            return
        try:
            yield
        finally:
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(fd, termios.TCSADRAIN, modes)


def _watch_socket(socket: int, stop: int, main_thread: int) -> None:
    """When the rank's end of the socket is closed, send SIGURG to the main thread again and again until `read` ends."""
    poll = select.poll()
    poll.register(socket, 0)  # nothing but the end
    poll.register(stop, select.POLLIN)
    if any(fd == stop for fd, _ in poll.poll()):
        return
    poll.unregister(socket)
    while not poll.poll(REPEAT_MS):  # repeat the signal, since the main thread may not wait in `input` yet
        signal.pthread_kill(main_thread, signal.SIGURG)


@contextmanager
def _own_history(readline: ModuleType, history: list[str]) -> Iterator[None]:
    """Replace the history of readline with `history`, the lines that the user has entered at debugger prompts.

    Restore the user's own history when the `with` block ends.
    """
    others = [readline.get_history_item(number + 1) for number in range(readline.get_current_history_length())]
    _set_history(readline, history)
    try:
        yield
    finally:
        _set_history(readline, others)


def _set_history(readline: ModuleType, lines: list[str]) -> None:
    readline.clear_history()
    for line in lines:
        readline.add_history(line)


@contextmanager
def _own_completer(readline: ModuleType, complete: Complete) -> Iterator[None]:
    words: list[str] = []

    def complete_next(text: str, state: int) -> str | None:
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
