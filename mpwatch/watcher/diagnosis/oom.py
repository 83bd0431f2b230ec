"""Finds out whether the kernel's out-of-memory (OOM) killer killed a rank. This module runs in the watcher thread.

A rank is a *suspect* if it died of a SIGKILL that did not come from the watcher. There are two sources of evidence:

1. The kernel's log, /dev/kmsg, names the pid of each process that the OOM killer killed. If mpwatch can read the kernel's
   log, only the log decides whether the OOM killer killed a suspect. To use the log, the watcher needs the right to read it,
   and must be in the kernel's first PID namespace. In most containers, mpwatch cannot read the kernel's log.
2. The counter `oom_kill` of the watcher's memory cgroup counts the processes that the OOM killer has killed. The kernel
   increments the counter before it kills a process. mpwatch uses the counter if it cannot read the kernel's log:
   - If the counter rose by at least the number of suspects in one wake-up, this proves that the OOM killer killed all of
     them.
   - If the counter rose, but by less than the number of suspects, the OOM killer is the likely cause of their deaths. For
     example, the counter rose by 1 when two suspects died.
   - If the cgroup has no such counter, but the counter of the whole machine (/proc/vmstat) rose, the OOM killer is the
     likely cause.

If the counter rose by 3 but only two suspects died, the OOM killer also killed one process that is not a rank, for example a
DataLoader worker.
"""

import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Self

from mpwatch.os_support.cgroups import count_oom_kills, count_oom_kills_of_machine
from mpwatch.watcher.diagnosis.observations import RankObservations
from mpwatch.watcher.observers.deferred_log import DeferredLog

KERNEL_LOG = "/dev/kmsg"
RECORD_SIZE = 8192  # bytes
# The kernel's log has the pids of this PID namespace: PROC_PID_INIT_INO in the kernel's sources.
FIRST_PID_NAMESPACE = "pid:[4026531836]"
KILLED = re.compile(r"((?:Memory cgroup o|O)ut of memory.*?: Killed process (\d+) \(.*?\).*?anon-rss:\d+kB)")


class OomDetector:
    """A context manager that finds out which deaths were OOM kills. Enter the context before the ranks are started."""

    def __init__(self, deferred_log: DeferredLog) -> None:
        self._deferred_log = deferred_log

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._log_fd = _open_log()
        if self._log_fd is not None:
            self._stack.callback(os.close, self._log_fd)
        self._group_counts = count_oom_kills()
        self._machine_count = count_oom_kills_of_machine()
        self._suspects: list[RankObservations] = []  # not yet looked up in the log
        self._other_kills: dict[str, int] = {}  # kills of processes that are no ranks, by the counter's file
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add_suspects(self, suspects: Iterable[RankObservations]) -> None:
        """Record all suspects whose deaths the watcher thread has just noticed, and read the counters of OOM kills.

        Call this method right after the deaths, because later kills also increase the counters.
        """
        killed = list(suspects)
        if not killed:
            return
        file, rise = self._read_rise()
        for observed in killed:
            if rise >= len(killed):
                observed.oom_proof = _describe_rise(file, rise)
            elif rise > 0:
                observed.oom_hint = _describe_rise(file, rise)
            elif not self._group_counts and count_oom_kills_of_machine() > self._machine_count:
                observed.oom_hint = "it killed a process on this machine during the run"
        self._count_other_kills(file, rise - len(killed))
        self._suspects += killed

    def resolve_suspects(self) -> str:
        """Look up the suspects in the kernel's log. Return a text about OOM kills of processes that are not ranks.

        Call this method when all ranks of a restart group have ended. The text covers the time since the last call of this
        method. If the OOM killer killed only ranks, or no process at all, the text is empty.
        """
        file, rise = self._read_rise()
        self._count_other_kills(file, rise)
        if self._suspects and self._log_fd is not None:
            logged = _find_kills(_read_log(self._log_fd, self._deferred_log))
            for observed in self._suspects:
                if observed.oom_proof and observed.pid not in logged:
                    self._count_other_kills(file, 1)
                observed.oom_proof = logged.get(observed.pid or 0, "")
                observed.oom_hint = ""
        others, self._other_kills, self._suspects = self._other_kills, {}, []
        return "; ".join(_describe_rise(file, times) for file, times in others.items())

    def _read_rise(self) -> tuple[str, int]:
        """Return the counter that rose most since the last call of this method, and by how much it rose."""
        now = count_oom_kills()
        rises = [(count - self._group_counts.get(file, count), file) for file, count in now.items()]
        self._group_counts = now
        rise, file = max(rises, default=(0, ""))
        return file, rise

    def _count_other_kills(self, file: str, times: int) -> None:
        if times > 0:
            self._other_kills[file] = self._other_kills.get(file, 0) + times


def _describe_rise(file: str, times: int) -> str:
    return f"oom_kill in {file} rose by {times} during the run"


def _open_log() -> int | None:
    """Open the kernel's log at its end.

    Return None if this process cannot open the kernel's log, or is not in the kernel's first PID namespace.
    """
    try:
        if os.readlink("/proc/self/ns/pid") != FIRST_PID_NAMESPACE:
            return None
        fd = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    os.lseek(fd, 0, os.SEEK_END)
    return fd


def _read_log(fd: int, deferred_log: DeferredLog) -> list[str]:
    """Return the new records of the kernel's log. The prefix of each record, up to the first semicolon, is left out."""
    lines: list[str] = []
    while True:
        try:
            record = os.read(fd, RECORD_SIZE)
        except BrokenPipeError:  # the kernel overwrote records before they were read
            deferred_log.debug("records of the kernel's log were overwritten before mpwatch read them")
            continue
        except OSError:
            return lines
        lines.append(record.decode(errors="replace").partition(";")[2])


def _find_kills(lines: Iterable[str]) -> dict[int, str]:
    """Return the OOM kills in the log, as a dict from the pid of the killed process to the log's text."""
    return {int(match[2]): match[1] for line in lines if (match := KILLED.search(line))}
