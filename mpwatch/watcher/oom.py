"""Whether the kernel's out-of-memory killer killed a rank: proved, likely, or not known. Reads what the kernel tells.

Proved is a death that the kernel's log names by its pid, where this program may read the log and sees the kernel's own
pids. Where it may not (most containers), it is one in a memory group whose counter has risen by as many as died so: the
kernel counts before it kills. It is likely if fewer were counted than died, or if they were counted for the machine alone.
"""

import os
import re
from collections.abc import Iterable
from contextlib import closing

from ..cgroups import oom_kills, oom_kills_of_machine
from .facts import RankFacts

__all__ = ["OomWatch"]

LOG = "/dev/kmsg"
RECORD_SIZE = 8192
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO in the kernel's sources: pids in it are those of the log
KILLED = re.compile(r"((?:Memory cgroup o|O)ut of memory.*?: Killed process (\d+) \(.*?\).*?anon-rss:\d+kB)")


class OomWatch:
    """Made before the ranks are started: it looks at what has changed since.

    Args:
        since: the time of its making, by CLOCK_MONOTONIC.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._groups = oom_kills()
        self._machine = oom_kills_of_machine()

    def judge(self, suspects: Iterable[RankFacts]) -> str:
        """Say of ranks that died of a SIGKILL not ours whether it was the kernel's. Returns what shows others of its."""
        killed = list(suspects)
        logged = _killed_by_the_log(self._since) if killed else None
        for facts in killed:
            facts.oom = (logged or {}).get(facts.pid or 0, "")
        unexplained = [facts for facts in killed if not facts.oom]
        file, risen = self._risen()
        others = risen - (len(killed) - len(unexplained))
        for facts in unexplained:
            if others >= len(unexplained) and logged is None:
                facts.oom = _counted(file, risen)
            elif others > 0:
                facts.likely_oom = _counted(file, risen)
            elif not self._groups and oom_kills_of_machine() > self._machine:
                facts.likely_oom = "it struck on this machine during the run"
        return _counted(file, others - len(unexplained))

    def _risen(self) -> tuple[str, int]:
        """The counter of our group that has risen most, and by how much."""
        now = oom_kills()
        rises = [(count - self._groups.get(file, count), file) for file, count in now.items()]
        risen, file = max(rises, default=(0, ""))
        return file, risen


def _counted(file: str, times: int) -> str:
    return f"oom_kill in {file} rose by {times} during the run" if times > 0 else ""


def _killed_by_the_log(since: float) -> dict[int, str] | None:
    """By pid, what the kernel's log says of those it has killed since then; None if it may not be read."""
    lines = _log_since(since)
    if lines is None:
        return None
    found = {}
    for line in lines:
        match = KILLED.search(line)
        if match:
            found[int(match[2])] = match[1]
    return found


def _log_since(since: float) -> list[str] | None:
    """Its lines from that time on; its clock and CLOCK_MONOTONIC may be a little apart."""
    try:
        if os.readlink("/proc/self/ns/pid") != FIRST_PID_NAMESPACE:
            return None
        fd = os.open(LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines = []
    with closing(os.fdopen(fd, "rb", buffering=0)) as log:
        while True:
            try:
                record = log.read(RECORD_SIZE)
            except BrokenPipeError:  # this record was overwritten while we read: the next
                continue
            except OSError:
                break
            if not record:  # None: no more for now
                break
            about, _, text = record.decode(errors="replace").partition(";")
            fields = about.split(",")
            if float(fields[2]) / 1e6 >= since - 1:
                lines.append(text)
    return lines
