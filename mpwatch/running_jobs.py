"""Look into jobs that other programs of this user run on this machine: `jobs`, `attach` and `Job`."""

import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from mpwatch.live_view.live import LiveView
from mpwatch.live_view.select import select_display
from mpwatch.os_support.clock import monotonic
from mpwatch.results.collective import Collective
from mpwatch.results.model import Progress, RankStatus, WorkerState, make_progress
from mpwatch.results.stacks import Stacks
from mpwatch.results.texts import format_count
from mpwatch.version import __version__
from mpwatch.wire.messages import PDB_PROMPT
from mpwatch.wire.visits import SUFFIX, ask, check_folder, check_peer, find_folder, receive_fd

HINT_SECONDS = 1.0  # from the answer of a rank to its prompt
MAX_PERIOD = 5.0  # seconds between two looks
ANSWER_SECONDS = 5.0  # a watcher that lives answers in milliseconds, stacks within two seconds


@dataclass(frozen=True)
class _Status:
    """What one watcher answers. A job of several nodes on this machine has one for each node."""

    run_id: str
    fn: str
    started_at: float
    state: WorkerState
    ranks: Sequence[RankStatus]


class Job:
    """A run, or a WorkerGroup, of another program of this user on this machine. `jobs` and `attach` make it.

    Each method asks the program anew, and raises LookupError if the job has ended, or TimeoutError if the program does not
    answer within five seconds, for example because it is suspended. The job does not notice the visit.

    Attributes:
        run_id: the run_id of the run.
        pids: the pid of the program, or of each node's program if several nodes are on this machine.
        fn: the name of the function, or "" for a WorkerGroup.
        started_at: seconds since the epoch.
    """

    def __init__(self, statuses: Mapping[str, _Status]) -> None:
        self._paths = tuple(statuses)
        self.pids = tuple(sorted({_pid_of(path) for path in statuses}))
        status = next(iter(statuses.values()))
        self.run_id, self.fn, self.started_at = status.run_id, status.fn, status.started_at

    @property
    def state(self) -> WorkerState:
        """The present state of the ranks, as `RunHandle.state`."""
        return self._ask_status().state

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that run on this machine."""
        return tuple(status.rank for status in self._ask_status().ranks)

    def stacks(self) -> Stacks:
        """Return the present stacks of each rank, as `RunHandle.stacks`."""
        found = self._ask({"ask": "stacks"})
        return Stacks(
            {rank: stack for stacks in found for rank, stack in stacks.items()},
            {rank: call for stacks in found for rank, call in stacks.collectives.items()},
            "\n".join(stacks.verdict for stacks in found if stacks.verdict),
        )

    def collectives(self) -> dict[int, Collective]:
        """Return the collective in which each rank waits, or otherwise its last one, as `RunResult.collectives`."""
        return self.stacks().collectives

    def progress(self) -> dict[int, Progress]:
        """Return what each rank passed to its last call of `mpwatch.report()`, as `RunHandle.progress`."""
        status = self._ask_status()
        begun = time.monotonic() - (time.time() - status.started_at)
        return {rank.rank: make_progress(rank.report, begun) for rank in status.ranks if rank.report is not None}

    def request_stop(self) -> bool:
        """Ask the ranks to save and return, as `RunHandle.request_stop`. Does not wait for them.

        Returns:
            Whether they run a function. If not, they are those of a WorkerGroup between two calls. A `mpwatch.map` goes on.
        """
        return any(self._ask({"ask": "stop"}))

    def debug(self, rank: int) -> None:
        """Open a prompt of pdb here, at the next line of Python that the main thread of a rank runs.

        The rank goes on when you leave the prompt, with `q`, Ctrl-D or Ctrl-C, and your breakpoints are removed. After `c`,
        this waits for the next one. Until you leave, the time limits of the run stand still.

        Raises:
            LookupError: if the rank runs no function, or has ended.
            TimeoutError: if the rank does not answer within five seconds: it is in C code, or at a prompt already.
        """
        for path in self._paths:
            with socket.socket(socket.AF_UNIX) as watcher:
                if _ask(watcher, path, {"ask": "debug", "rank": rank}):
                    _converse(rank, watcher)
                    return
        raise LookupError(f"rank {rank} runs no function here that can be interrupted")

    def view(self) -> None:
        """Show the live view here until the job ends, or until Ctrl-C, which ends the view only."""
        view = LiveView(
            lambda: select_display(allow_lines=True),
            lambda show: show(self._ask_status().ranks),
            starts_at_once=True,
            first_period=0.0,
        )
        try:
            while view.next_update_at < math.inf:  # there is a place for it
                view.update()
                time.sleep(max(0.0, min(view.next_update_at - monotonic(), MAX_PERIOD)))
        except (KeyboardInterrupt, LookupError) as error:
            view.close(())
            sys.stderr.write(f"mpwatch: {error}\n" if isinstance(error, LookupError) else "")
        finally:
            view.close(())

    def __repr__(self) -> str:
        try:
            status = self._ask_status()
        except (LookupError, TimeoutError) as error:
            return f"<Job {self.run_id}: {error}>"
        what = f"{self.fn or 'WorkerGroup'} on {format_count(len(status.ranks), 'rank')}"
        return f"<Job {self.run_id}: {what}, {status.state.name}, process {', '.join(map(str, self.pids))}>"

    def _ask_status(self) -> _Status:
        found = [_Status(*answer) for answer in self._ask({"ask": "status"})]
        ranks = [replace(rank, node=node) for node, status in enumerate(found) for rank in status.ranks]
        state = max((status.state for status in found), key=list(WorkerState).index)
        return replace(found[0], state=state, ranks=sorted(ranks, key=lambda rank: rank.rank))

    def _ask(self, question: dict[str, Any]) -> list[Any]:
        answers = [answer for path in self._paths if (answer := _ask_once(path, question)) is not None]
        if not answers:
            raise LookupError("the job has ended")
        return answers


def _converse(rank: int, watcher: socket.socket) -> None:
    """The other end is worker/debugger.py."""
    try:
        fd = receive_fd(watcher)
    except TimeoutError:
        raise TimeoutError(f"rank {rank} does not answer: it is in C code, or at a prompt already; see stacks()") from None
    with Connection(fd) as connection, suppress(EOFError, OSError, KeyboardInterrupt):  # the rank ends, or the user goes
        if not connection.poll(HINT_SECONDS):
            sys.stderr.write(f"waiting until rank {rank} runs the next line of Python; Ctrl-C lets it go on\n")
        while True:
            text, *_ = connection.recv()
            output, newline, prompt = text.rpartition("\n")
            sys.stdout.write(output + newline)
            try:
                line = f"{input(f'(rank {rank}) {prompt}')}\n"
            except EOFError:
                line = ""
            if prompt.endswith(PDB_PROMPT) and line.strip(" \t") in ("", "q\n", "quit\n", "exit\n"):
                return
            connection.send(line)


def jobs() -> list[Job]:
    """Return the runs and WorkerGroups of all programs of this user on this machine, the oldest first.

    A program with another version of mpwatch, or one that does not answer, for example because it is suspended, is left out.
    Raises PermissionError if another user has made the folder of the sockets.
    """
    return _find_jobs([])


def _find_jobs(missed: list[str]) -> list[Job]:
    """`missed` gets a line for each socket whose job is left out."""
    by_run: dict[str, dict[str, _Status]] = {}
    for path in _list_sockets():
        if (version := _version_of(path)) != __version__:
            missed.append(f"process {_pid_of(path)} has mpwatch {version}, and this one has {__version__}")
            continue
        try:
            answer = _ask_once(path, {"ask": "status"})
        except TimeoutError as error:
            missed.append(str(error))
        except (AttributeError, ImportError):  # another checkout of the same version
            missed.append(f"process {_pid_of(path)} has another mpwatch")
        else:
            if answer is not None:
                status = _Status(*answer)
                by_run.setdefault(status.run_id, {})[path] = status
    return sorted(map(Job, by_run.values()), key=lambda job: job.started_at)


def attach(which: int | str | None = None) -> Job:
    """Return the job of a program that runs on this machine.

    Args:
        which: the pid of the program or of one of its ranks, or the run_id. None if there is only one job.

    Raises:
        LookupError: if there is no such job, or more than one. The text lists the jobs.
    """
    missed: list[str] = []
    found = _find_jobs(missed)
    fitting = [job for job in found if which is None or _fits(job, which)]
    if len(fitting) == 1:
        return fitting[0]
    head = f"there are {len(fitting)} such jobs" if fitting else "no such job of this user on this machine has answered"
    raise LookupError("\n  ".join([head, *map(repr, fitting or found), *missed]))


def _fits(job: Job, which: int | str) -> bool:
    if which == job.run_id:
        return True
    if isinstance(which, str) and not which.isdecimal():
        return False
    pid = int(which)
    try:
        return pid in job.pids or any(rank.pid == pid for rank in job._ask_status().ranks)
    except (LookupError, TimeoutError):  # it has ended just now
        return False


def _list_sockets() -> list[str]:
    folder = find_folder()
    try:
        check_folder(folder)
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(os.path.join(folder, name) for name in names if name.endswith(SUFFIX))


def _pid_of(path: str) -> int:
    return int(os.path.basename(path).partition("-")[0])


def _version_of(path: str) -> str:
    return os.path.basename(path).removesuffix(SUFFIX).split("-", 2)[-1]


def _ask_once(path: str, question: dict[str, Any]) -> Any:
    with socket.socket(socket.AF_UNIX) as watcher:
        return _ask(watcher, path, question)


def _ask(watcher: socket.socket, path: str, question: dict[str, Any]) -> Any:
    """Connect to a watcher. Return None if it has ended. Raises TimeoutError."""
    watcher.settimeout(ANSWER_SECONDS)
    try:
        watcher.connect(path)
        if pid := check_peer(watcher):
            os.kill(pid, 0)  # a process that it has forked may keep the socket of a dead one open
        return ask(watcher, question)
    except (TimeoutError, BlockingIOError):  # BlockingIOError: too many visitors wait already
        raise TimeoutError(f"process {_pid_of(path)} does not answer; it may be suspended") from None
    except (ConnectionRefusedError, ProcessLookupError):  # it was killed
        with suppress(OSError):
            os.unlink(path)
        return None
    except (OSError, EOFError):
        return None
