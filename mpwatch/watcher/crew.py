"""The ranks as the watcher has them: processes, channels, black boxes and the guardian, all owned here.

Guarantee: when the crew is closed, every rank it started is dead and reaped (but for one that not even SIGKILL ends, which
is left to the kernel), and everything it opened is closed.
"""

import dataclasses
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from multiprocessing import current_process
from multiprocessing.connection import wait
from typing import Any, Self

from ..errors import LaunchError
from ..platform import anonymous_file, group_exists, group_members, open_pidfd
from ..spec import Worker
from ..wire.lastwords import SLOT, read_answer, read_crash
from ..wire.messages import MAX_DESCRIPTORS, Frames, Kind, Message, frame
from ..wire.payload import Payload
from ..wire.process import Seat
from .diagnosis import RankFacts
from .guardian import Guardian
from .machine import KILL_SECONDS
from .process import WatchedProcess

__all__ = ["Crew", "RankLine"]

log = logging.getLogger("mpwatch")

READ_SIZE = 1 << 18
DRAIN_LIMIT = 1 << 26  # bytes read of one channel before the others have their turn
REMEDIES: dict[int | None, str] = {
    errno.EMFILE: "raise the limit of open files (`ulimit -n`): a rank takes about 4 descriptors",
    errno.ENFILE: "the system has no more open files: see /proc/sys/fs/file-max",
    errno.EAGAIN: "raise the limit of processes (`ulimit -u`, or pids.max of the container)",
    errno.ENOMEM: "free some memory, or start fewer ranks",
    errno.E2BIG: "the environment is too large for a new process: see `env`",
    errno.ENOENT: "does the folder that this program runs in, and its Python, still exist?",
    errno.ETOOMANYREFS: "raise the limit of open files (`ulimit -n`), or torch's sharing strategy 'file_system'",
}


class RankLine:
    """One rank as the watcher has it: its process, its channel, and what was seen of it."""

    def __init__(self, worker: Worker, process: WatchedProcess, channel: socket.socket, lastwords_fd: int) -> None:
        self.process = process
        self.channel = channel
        self._lastwords_fd = lastwords_fd
        self.frames = Frames()
        self.facts = RankFacts(worker)

    def send(self, kind: Kind, fds: Sequence[int] = ()) -> None:
        """A few bytes: they fit into the empty buffer of the channel, so this does not block. Raises OSError."""
        if not self.is_open:
            return
        # a rank that has closed its end, or died, is heard of otherwise
        with suppress(BrokenPipeError, ConnectionResetError):
            while len(fds) > MAX_DESCRIPTORS:
                self._send(Kind.DESCRIPTORS, fds[:MAX_DESCRIPTORS])
                fds = fds[MAX_DESCRIPTORS:]
            self._send(kind, fds)

    def _send(self, kind: Kind, fds: Sequence[int]) -> None:
        # the host's SIGPIPE may be at its default, and would end it
        socket.send_fds(self.channel, [frame(kind)], list(fds), getattr(socket, "MSG_NOSIGNAL", 0))

    def answer_left(self) -> Message | None:
        """What a dead rank could not send any more, and has left in its black box."""
        try:
            return read_answer(self._lastwords_fd)
        except ValueError as error:  # its own memory has been overwritten
            log.debug("the black box of rank %d: %s", self.facts.worker.rank, error)
            return None

    def crash_stack(self) -> str:
        """The Python stack at which a dead rank crashed, if it did."""
        return read_crash(self._lastwords_fd)

    @property
    def is_open(self) -> bool:
        """Whether more may come over the channel."""
        return self.channel.fileno() != -1

    def close(self) -> None:
        """Give the descriptors back; the process is the crew's to bury."""
        self.channel.close()
        os.close(self._lastwords_fd)

    def read(self) -> list[Message]:
        """What has come. Closes the channel if there will be no more."""
        messages: list[Message] = []
        try:
            for _ in range(DRAIN_LIMIT // READ_SIZE):
                data = self.channel.recv(READ_SIZE)
                if not data:
                    self.channel.close()
                    break
                messages += self.frames.feed(data)
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:  # reset by a dead rank, or written to by somebody who is none
            log.debug("channel of rank %d closed: %s", self.facts.worker.rank, error)
            self.channel.close()
        return messages


class Crew:
    """Owns the ranks' processes and all that they need. A context manager: whoever is alive at its end is killed."""

    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self.lines: dict[int, RankLine] = {}
        self._groups: list[int] = []  # of buried ranks, with helpers that have been killed but are not gone yet

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            try:
                self.guardian = stack.enter_context(closing(Guardian()))
            except OSError as error:
                raise LaunchError(_with_remedy("the ranks cannot be watched", error)) from error
            stack.callback(self._await_helpers)
            stack.callback(self._kill_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, worker: Worker, env: dict[str, str]) -> None:
        """Start a rank. Raises LaunchError."""
        try:
            self._start(worker, env)
        except (OSError, RuntimeError, AssertionError) as error:
            raise LaunchError(_why_not_started(worker, error)) from error

    def _start(self, worker: Worker, env: dict[str, str]) -> None:
        with ExitStack() as stack:
            lastwords_fd = anonymous_file("mpwatch-lastwords")
            stack.callback(os.close, lastwords_fd)
            os.ftruncate(lastwords_fd, SLOT)
            ours, theirs = map(stack.enter_context, socket.socketpair())
            ours.setblocking(False)
            seat = Seat(_fields_of(worker), theirs.fileno(), lastwords_fd)
            process = WatchedProcess(seat, env, [theirs.fileno(), lastwords_fd], f"mpwatch-rank-{worker.rank}")
            process.start()
            theirs.close()
            stack.pop_all()
        line = self.lines[worker.rank] = RankLine(worker, process, ours, lastwords_fd)
        line.facts.pid = process.child_pid
        self.guardian.guard(process.child_pid)

    def call(self, line: RankLine) -> None:
        """Send a rank its call. Raises LaunchError."""
        try:
            line.send(Kind.CALL, self.payload.fds)
        except OSError as error:
            raise LaunchError(_with_remedy(f"the call could not be sent to rank {line.facts.worker.rank}", error)) from error

    def bury(self, line: RankLine) -> None:
        """Reap a dead rank."""
        pid = line.process.child_pid
        del self.lines[line.facts.worker.rank]
        line.close()
        line.process.bury()
        self.guardian.release(pid)
        if group_exists(pid):
            self._groups.append(pid)

    def abandon(self, line: RankLine) -> None:
        """Leave a rank that cannot be killed to the kernel."""
        line.close()
        line.process.abandon()
        del self.lines[line.facts.worker.rank]

    def _kill_all(self) -> None:
        """For the ranks that are left when something has gone wrong on our side."""
        for line in self.lines.values():
            line.process.signal_group(signal.SIGKILL)
        deadline = time.monotonic() + KILL_SECONDS
        with ExitStack() as stack:  # one that fails does not keep the others from being buried
            for line in self.lines.values():
                stack.callback(self._bury_by, deadline, line)

    def _bury_by(self, deadline: float, line: RankLine) -> None:
        if wait([line.process.child.sentinel], max(0.0, deadline - time.monotonic())):
            self.bury(line)
        else:
            self.abandon(line)

    def _await_helpers(self) -> None:
        """What ranks had started is killed with them, but takes its time to go if it held much memory, or a GPU."""
        deadline = time.monotonic() + KILL_SECONDS
        for pid in [pid for group in self._groups for pid in group_members(group)]:
            pidfd = open_pidfd(pid)
            if pidfd is None:
                continue
            try:
                if not wait([pidfd], max(0.0, deadline - time.monotonic())):
                    log.warning("process %d, started by a rank, has not yet gone although it has been killed", pid)
            finally:
                os.close(pidfd)


def _fields_of(worker: Worker) -> dict[str, Any]:
    """What a rank needs to know itself, without `state`, which is its own."""
    return {field.name: getattr(worker, field.name) for field in dataclasses.fields(worker) if field.name != "state"}


def _why_not_started(worker: Worker, error: Exception) -> str:
    if getattr(current_process(), "_inheriting", False):
        return (
            "mpwatch was called while __main__ is being imported again, by a process that multiprocessing has spawned (a "
            "DataLoader's worker, say); put the call under: if __name__ == '__main__':"
        )
    what = f"rank {worker.rank} could not be started"
    if current_process().daemon:
        return f"{what}: {error}; start the run in a process that is not daemonic"
    return _with_remedy(what, error)


def _with_remedy(what: str, error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    remedy = f"; {REMEDIES[number]}" if number in REMEDIES else ""
    return f"{what}: {type(error).__name__}: {error}{remedy}"
