"""Whether the kernel's out-of-memory killer killed a rank: proved, likely, or not known. Reads what the kernel tells.

Where this program may read the kernel's log, and sees the kernel's own pids, that names whom it has killed, and nobody else
was. Where it may not (in most containers), the counter of the memory group speaks: the kernel counts before it kills. A rise
by as many as have just died of a SIGKILL that is not ours is taken for proof; it is likely if fewer were counted, or if
they were counted for the machine alone.
"""

import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Self

from mpwatch.os_support.cgroups import oom_kills, oom_kills_of_machine
from mpwatch.watcher.diagnosis.observations import RankObservations
from mpwatch.watcher.observers.deferred_log import DeferredLog

LOG = "/dev/kmsg"
RECORD_SIZE = 8192
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO in the kernel's sources: pids in it are those of the log
KILLED = re.compile(r"((?:Memory cgroup o|O)ut of memory.*?: Killed process (\d+) \(.*?\).*?anon-rss:\d+kB)")


class OomDetector:
    """A context manager, entered before the ranks are started: it looks at what has changed since."""

    def __init__(self, deferred_log: DeferredLog) -> None:
        self._deferred_log = deferred_log

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._log_fd = _open_log()
        if self._log_fd is not None:
            self._stack.callback(os.close, self._log_fd)
        self._groups = oom_kills()
        self._machine = oom_kills_of_machine()
        self._suspects: list[RankObservations] = []  # who have not been judged
        self._others: dict[str, int] = {}  # kills that were of no rank, by counter
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def look(self, suspects: Iterable[RankObservations]) -> None:
        """These have just died of a SIGKILL that is not ours. What the counters show now is about them."""
        killed = list(suspects)
        if killed:
            file, risen = self._risen()
            for observations in killed:
                if risen >= len(killed):
                    observations.oom = _counted(file, risen)
                elif risen > 0:
                    observations.likely_oom = _counted(file, risen)
                elif not self._groups and oom_kills_of_machine() > self._machine:
                    observations.likely_oom = "it struck on this machine during the run"
            self._note_others(file, risen - len(killed))
            self._suspects += killed

    def judge(self) -> str:
        """When ranks have ended: whom the log names, if it can be read. Returns what shows that others than ranks were hit,
        since the last time.
        """
        file, risen = self._risen()
        self._note_others(file, risen)
        if self._suspects and self._log_fd is not None:
            logged = _killed_by(_read_log(self._log_fd, self._deferred_log))
            for observations in self._suspects:
                if observations.oom and observations.pid not in logged:
                    self._note_others(file, 1)
                observations.oom = logged.get(observations.pid or 0, "")
                observations.likely_oom = ""
        others, self._others, self._suspects = self._others, {}, []
        return "; ".join(_counted(file, times) for file, times in others.items())

    def _risen(self) -> tuple[str, int]:
        """The counter of our group that has risen most since the last look, and by how much."""
        now = oom_kills()
        rises = [(count - self._groups.get(file, count), file) for file, count in now.items()]
        self._groups = now
        risen, file = max(rises, default=(0, ""))
        return file, risen

    def _note_others(self, file: str, times: int) -> None:
        if times > 0:
            self._others[file] = self._others.get(file, 0) + times


def _counted(file: str, times: int) -> str:
    return f"oom_kill in {file} rose by {times} during the run"


def _open_log() -> int | None:
    """The kernel's log from now on; None if it may not be read, or is about other pids than ours."""
    try:
        if os.readlink("/proc/self/ns/pid") != FIRST_PID_NAMESPACE:
            return None
        fd = os.open(LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    os.lseek(fd, 0, os.SEEK_END)
    return fd


def _read_log(fd: int, deferred_log: DeferredLog) -> list[str]:
    """A line for each record: its text follows a semicolon."""
    lines: list[str] = []
    while True:
        try:
            record = os.read(fd, RECORD_SIZE)
        except BrokenPipeError:  # some were overwritten before we read them
            deferred_log.debug("the kernel's log is longer than what it keeps")
            continue
        except OSError:
            return lines
        lines.append(record.decode(errors="replace").partition(";")[2])


def _killed_by(lines: Iterable[str]) -> dict[int, str]:
    """By pid, what is said of those that were killed for memory."""
    return {int(match[2]): match[1] for line in lines if (match := KILLED.search(line))}
