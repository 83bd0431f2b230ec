"""Shows the prompts of ranks that are at a breakpoint, one after another, in the caller's thread.

    rank --- DEBUGGER with a socket ---> event loop ---> Watcher ---> DebuggerConsole.serve ---> RankSession
    rank --- output and prompt ---> RankSession ---> the terminal or the notebook
    rank <--- line ---------------- RankSession <--- the user

pdb runs in the rank: worker/debugger.py lists the messages. The console handles `quit` itself. While a prompt is open, the
time limits of the run stand still, the live view is hidden, and captured output of the ranks is held back until the next
prompt.

Python's `input` reads the lines: IPython's kernel replaces it, and in a terminal it uses the module readline. If the rank
ends meanwhile, `input` waits until the user presses Enter or Ctrl-C.
"""

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

from mpwatch.options.log_spec import in_notebook
from mpwatch.results.places import format_place
from mpwatch.results.texts import clean_line
from mpwatch.watcher.inbox import Outbox
from mpwatch.watcher.output.rank_output import RankOutput
from mpwatch.wire.exceptions.source_lines import cell_name, get_ipython_shell
from mpwatch.wire.messages import PDB_PROMPT

if TYPE_CHECKING:
    from mpwatch.live_view.live import LiveView

NEXT_PROMPT_SECONDS = 0.3  # for a rank that executes a command to reach its next prompt; other prompts wait meanwhile
DRAIN_SECONDS = 0.5  # for the output that is shown before a prompt
STACK_ENTRY = re.compile(r"^([> ] )(.+?)(?=\(\d+\))", re.MULTILINE)  # of pdb: `> /tmp/train.py(7)train()`
USER_QUIT = "the user has ended the run at the prompt of rank {}"


class WatchedRanks(Protocol):
    outbox: Outbox
    output: RankOutput

    def take_debugger_sockets(self) -> Sequence[tuple[int, int]]: ...
    def suspend_limits(self, *, are_suspended: bool) -> None: ...


class Prompter(Protocol):
    received: list[int]
    is_at_prompt: bool


class RankSession:
    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self.connection = connection
        self.output = ""  # that has not been shown
        self.prompt = ""
        self.place = ""  # in the code
        self.is_at_prompt = False  # the rank waits for a line
        self.can_be_left = False

    def receive(self) -> None:
        """Read the messages that have arrived from the rank. Raises EOFError or OSError if the rank has ended."""
        while self.connection.poll():
            text, self.can_be_left, thread, place = self.connection.recv()
            lines, newline, prompt = text.rpartition("\n")
            self.output = STACK_ENTRY.sub(lambda entry: entry[1] + (cell_name(entry[2]) or entry[2]), lines + newline)
            if place is not None:  # it is None at a question of pdb
                self.place = format_place(*place)
            self.prompt = f"(rank {self.rank}{f', {clean_line(thread)}' if thread else ''}) {prompt}"
            self.is_at_prompt = True

    def take_output(self) -> str:
        output, self.output = self.output, ""
        return output

    def answer(self, message: str | tuple[str]) -> None:
        self.is_at_prompt = False
        with suppress(OSError):  # the rank has ended; `receive` notices it
            self.connection.send(message)


class DebuggerConsole:
    def __init__(self, watcher: WatchedRanks) -> None:
        self._watcher = watcher
        self._output = watcher.output
        self._has_warned = False
        self._lock = threading.Lock()  # the main thread may begin to serve while another one does
        self._sessions: dict[int, RankSession] = {}  # by rank
        self._last_rank: int | None = None  # whose prompt was shown last

    @property
    def connections(self) -> list[Connection]:
        """When a message arrives on one of these, call `serve`."""
        return [session.connection for session in self._sessions.values()]

    def serve(self, signals: Prompter, view: "LiveView | None", is_in_charge: Callable[[], bool]) -> None:
        """Show the prompts of all ranks at a breakpoint. Raises KeyboardInterrupt if the user ends the run.

        If the main thread has begun to wait meanwhile, this thread is not in charge any more.
        """
        first = self._choose()
        if first is None or not is_in_charge():
            return
        if reason := explain_missing_prompt():
            self._refuse_all(reason)
        elif signal.SIGINT in signals.received:  # Ctrl-C came while a rank executed a command
            raise KeyboardInterrupt(USER_QUIT.format(first.rank))
        elif not signals.received:
            with self._suspended_run(view):
                self._show_prompts(signals)

    def _show_prompts(self, signals: Prompter) -> None:
        """Return also when a deferred signal ends the run: the program gets it when the ranks have ended."""
        try:
            signals.is_at_prompt = True
            while not signals.received and (session := self._choose()) is not None:
                self._show_output(session)
                self._handle_line(session)
        except KeyboardInterrupt:
            if not signals.received:
                raise KeyboardInterrupt(USER_QUIT.format(self._last_rank)) from None
        finally:
            signals.is_at_prompt = False

    def close(self) -> None:
        for session in self._sessions.values():
            session.connection.close()
        self._sessions.clear()

    def _refuse_all(self, reason: str) -> None:
        for session in self._get_stopped():
            if not session.can_be_left:
                session.answer((reason,))
                continue
            session.answer("")
            if not self._has_warned:
                self._has_warned = True
                self._watcher.outbox.warn("debug='post_mortem' can open no prompt: %s", reason)

    def _receive(self) -> None:
        """Begin a session with each rank that has sent a socket. Read all messages. Forget the ranks that have ended."""
        with self._lock:
            for rank, fd in self._watcher.take_debugger_sockets():
                if rank in self._sessions:  # before the rank was restarted
                    self._sessions[rank].connection.close()
                self._sessions[rank] = RankSession(rank, Connection(fd))
            for session in list(self._sessions.values()):
                try:
                    session.receive()
                except (EOFError, OSError):
                    session.connection.close()
                    del self._sessions[session.rank]

    def _choose(self) -> RankSession | None:
        """Return the session whose prompt comes next: that of the last rank, or else of the lowest one at a prompt."""
        self._receive()
        return min(self._get_stopped(), key=lambda session: (session.rank != self._last_rank, session.rank), default=None)

    def _get_stopped(self) -> list[RankSession]:
        return [session for session in self._sessions.values() if session.is_at_prompt]

    def _handle_line(self, session: RankSession) -> None:
        """Raises KeyboardInterrupt if the user, or a signal, ends the run."""
        line, is_interrupted = "", False
        try:
            line = f"{input(session.prompt)}\n"
        except UnicodeDecodeError as error:
            self._write(f"*** {error}\n")
            return
        except (EOFError, KeyboardInterrupt) as error:
            self._write("\n")  # after what Ctrl-D or Ctrl-C shows
            is_interrupted = isinstance(error, KeyboardInterrupt)
        self._receive()
        if self._sessions.get(session.rank) is not session:
            self._write(f"rank {session.rank} has ended\n")
            return
        is_at_pdb = session.prompt.endswith(PDB_PROMPT)  # not in `interact` or `commands`, nor at a question
        is_quit = not line or (is_at_pdb and line.split() in (["q"], ["quit"], ["exit"]))
        if is_interrupted or (is_quit and not session.can_be_left):
            raise KeyboardInterrupt
        session.answer(line)
        session.connection.poll(NEXT_PROMPT_SECONDS)

    @contextmanager
    def _suspended_run(self, view: "LiveView | None") -> Iterator[None]:
        self._watcher.suspend_limits(are_suspended=True)
        self._output.hold(is_held=True)
        try:
            if view is not None:
                view.pause()
            with suppress(Exception):  # a stream of the user's own may raise anything
                if not in_notebook() and not sys.stdout.isatty():
                    sys.stderr.write("mpwatch: a rank is at a breakpoint; the prompt of its debugger is on stdout\n")
            yield
        finally:
            try:
                self._output.hold(is_held=False)
            finally:
                self._watcher.suspend_limits(are_suspended=False)

    def _show_output(self, session: RankSession) -> None:
        """Show the captured output of all ranks, then the output of pdb in `session`."""
        last, self._last_rank = self._last_rank, session.rank
        self._output.drain_all(DRAIN_SECONDS)
        if last not in (None, session.rank):
            self._write(f"now at rank {session.rank}: {session.place}\n")
        self._write(session.take_output())

    def _write(self, text: str) -> None:
        stream: Any = sys.stdout
        with suppress(Exception):  # None, or an object of the user that may raise anything
            stream.write(text)
            stream.flush()


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
