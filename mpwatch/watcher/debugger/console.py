"""Shows the prompts of ranks that are at a breakpoint, one after another, in the caller's thread.

    rank --- DEBUGGER with a socket ---> event loop ---> Watcher ---> DebuggerConsole.serve ---> RankSession
    rank --- output and prompt ---> RankSession ---> the terminal or the notebook
    rank <--- line ---------------- RankSession <--- the user

pdb runs in the rank: worker/debugger.py lists the messages. The console handles the commands `ranks`, `rank N`,
`all COMMAND` and `quit` itself. While a prompt is open, the time limits of the run stand still, the live view is hidden, and
captured output of the ranks is held back until the next prompt.

Python's `input` reads the lines: IPython's kernel replaces it, and in a terminal it uses the module readline. If the rank
ends meanwhile, a thread that watches its socket sends SIGURG, whose handler raises PromptClosedError. A process ignores
SIGURG by default, so a late one has no effect.
"""

import re
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from mpwatch.options.log_spec import in_notebook
from mpwatch.os_support.clock import monotonic
from mpwatch.results.places import format_place
from mpwatch.results.stacks import Stacks, group_places
from mpwatch.results.texts import clean_line, format_ranks
from mpwatch.watcher.inbox import WakeupPipe
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.output.rank_output import RankOutput
from mpwatch.wire.exceptions.source_lines import cell_name, get_ipython_shell
from mpwatch.wire.messages import PDB_PROMPT

if TYPE_CHECKING:
    from mpwatch.live_view.live import LiveView

NEXT_PROMPT_SECONDS = 0.3  # for a rank that executes a command to reach its next prompt; other prompts wait meanwhile
ALL_PROMPTS_SECONDS = 1.0  # the same for `all COMMAND`
REQUEST_SECONDS = 1.0  # for the watcher thread to answer
REPEAT_MS = 50  # between two SIGURG
DRAIN_SECONDS = 0.5  # for the output that is shown before a prompt
STACK_ENTRY = re.compile(r"^([> ] )(.+?)(?=\(\d+\))", re.MULTILINE)  # of pdb: `> /tmp/train.py(7)train()`
USER_QUIT = "the user has ended the run at the prompt of rank {}"


class WatchedRanks(Protocol):
    deferred_log: DeferredLog
    output: RankOutput

    def take_debugger_sockets(self) -> Sequence[tuple[int, int]]: ...
    def take_stacks(self, seconds: float | None) -> Stacks: ...
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
        self._sessions: dict[int, RankSession] = {}
        self._current: RankSession | None = None  # whose prompt was shown last
        self._quit_at: int | None = None  # the rank at whose prompt the user has ended the run

    @property
    def connections(self) -> list[Connection]:
        """When a message arrives on one of these, call `serve`."""
        return [session.connection for session in self._sessions.values()]

    def serve(self, signals: Prompter, view: "LiveView | None") -> None:
        """Show the prompts of all ranks at a breakpoint. Raises KeyboardInterrupt, once, if the user ends the run."""
        self._receive()
        first = self._choose()
        if first is None:
            return
        if reason := explain_missing_prompt():
            self._refuse_all(reason)
            return
        if signals.received:  # Ctrl-C came while a rank executed a command
            self._quit_at = first.rank
        else:
            self._show_prompts(signals, view)
        if self._quit_at is not None:
            rank, self._quit_at = self._quit_at, None
            raise KeyboardInterrupt(USER_QUIT.format(rank))

    def _show_prompts(self, signals: Prompter, view: "LiveView | None") -> None:
        with self._suspended_run(view):
            while (session := self._choose()) is not None:
                try:
                    self._show_output(session)
                    signals.is_at_prompt = True
                    self._handle_line(session, read_line(session.prompt, session.connection.fileno()))
                except PromptClosedError:
                    self._write("\n")
                    self._receive()
                except UnicodeDecodeError as error:
                    self._write(f"*** {error}\n")
                except KeyboardInterrupt:
                    self._write("\n")
                    self._quit_at = session.rank
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
                self._watcher.deferred_log.warning("debug='post_mortem' can open no prompt: %s", reason)

    def _receive(self) -> None:
        """Begin a session with each rank that has sent a socket. Read all messages. Forget the ranks that have ended."""
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
                if session is self._current:
                    self._current = None

    def _choose(self) -> RankSession | None:
        if self._quit_at is not None:
            return None
        if self._current is not None and self._current.is_at_prompt:
            return self._current
        return next(iter(self._get_stopped()), None)

    def _get_stopped(self) -> list[RankSession]:
        return [self._sessions[rank] for rank in sorted(self._sessions) if self._sessions[rank].is_at_prompt]

    def _handle_line(self, session: RankSession, line: str) -> None:
        self._receive()  # other ranks may have come to a breakpoint while the user was typing
        if not line:
            self._write("\n")  # after what Ctrl-D shows
            if not session.can_be_left:
                self._quit_at = session.rank
                return
        # not at the prompt of `interact` or `commands`, nor at a question
        match line.split() if session.prompt.endswith(PDB_PROMPT) else []:
            case ["ranks"]:
                stopped = {each.rank: f" at a prompt ({each.place})" for each in self._get_stopped()}
                for ranks, place in group_places(self._watcher.take_stacks(REQUEST_SECONDS) | stopped):
                    self._write(f"{ranks}:{place}\n")
            case ["rank", number] if number.isdecimal():
                self._switch(int(number))
            case ["q" | "quit" | "exit"] | ["all", "q" | "quit" | "exit"] if not session.can_be_left:
                self._quit_at = session.rank
            case ["all", command, *_] if re.match(r"[\w!]", command):
                self._ask_all(line.strip().removeprefix("all").lstrip())
            case _:
                session.answer(line)
                self._wait_for_prompts([session], NEXT_PROMPT_SECONDS)

    def _wait_for_prompts(self, expected: Sequence[RankSession], seconds: float) -> None:
        deadline = monotonic() + seconds
        while running := [one for one in expected if not one.is_at_prompt and one in self._sessions.values()]:
            if not wait([one.connection for one in running], max(0.0, deadline - monotonic())):
                return
            self._receive()

    def _switch(self, rank: int) -> None:
        session = self._sessions.get(rank)
        if session is not None and session.is_at_prompt:
            self._current = session
            if not session.output:
                self._write(f"rank {rank} is at {session.place}\n")
            return
        stacks = self._watcher.take_stacks(REQUEST_SECONDS)
        stack = stacks.get(rank, "no answer")
        if stacks and rank not in stacks:
            self._write(f"there is no rank {rank} here, only {format_ranks(stacks)}\n")
        elif "\n" in stack:
            self._write(f"rank {rank} is not at a prompt\n{Stacks({rank: stack})}\n")
        else:
            self._write(f"rank {rank} is not at a prompt ({stack})\n")

    def _ask_all(self, line: str) -> None:
        running = {
            rank
            for rank, stack in self._watcher.take_stacks(REQUEST_SECONDS).items()
            if "\n" in stack or stack.startswith("running")
        }
        self._receive()  # prompts that have opened meanwhile
        asked = self._get_stopped()
        for session in asked:
            session.take_output()  # where it had stopped; `rank N` shows it, too
            session.answer(f"{line}\n")
        self._wait_for_prompts(asked, ALL_PROMPTS_SECONDS)
        for session in asked:
            if output := session.take_output():
                self._write(f"rank {session.rank}:{' ' if len(output.splitlines()) == 1 else chr(10)}{output}")
        if missed := running.difference(session.rank for session in asked):
            self._write(f"not at a prompt: {format_ranks(missed)}\n")

    def _describe_move(self, last: RankSession, new: RankSession) -> str:
        now = f"now at rank {new.rank}: {new.place}"
        stack = self._watcher.take_stacks(REQUEST_SECONDS).get(last.rank)
        if stack is None:
            return now
        ((_, place),) = group_places({last.rank: stack})
        verb = " is still" if place.startswith(" in ") else " runs" if place.startswith(" (") else ":"
        return f"rank {last.rank}{verb}{place}; {now}"

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
        """Show the captured output of all ranks, then the output of pdb in `session`. Make `session` the current session."""
        self._output.drain_all(DRAIN_SECONDS)
        if self._current is not None and self._current.rank != session.rank:
            self._write(self._describe_move(self._current, session) + "\n")
        self._current = session
        self._write(session.take_output())

    def _write(self, text: str) -> None:
        stream: Any = sys.stdout
        with suppress(Exception):  # None, or an object of the user that may raise anything
            stream.write(text)
            stream.flush()


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
    """Return "" at Ctrl-D. Raises KeyboardInterrupt at Ctrl-C, PromptClosedError if the rank closes its end."""
    with ExitStack() as stack:
        handler = signal.signal(signal.SIGURG, _close_prompt)
        stack.callback(signal.signal, signal.SIGURG, signal.SIG_DFL if handler is None else handler)
        stop = stack.enter_context(closing(WakeupPipe()))
        arguments = (socket, stop.fileno(), threading.get_ident())
        thread = threading.Thread(target=_watch_socket, args=arguments, name="mpwatch-prompt", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.wake)
        try:
            return f"{input(prompt)}\n"
        except EOFError:
            return ""


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
