"""Finds out whether the kernel's out-of-memory (OOM) killer killed a rank. Runs in the watcher thread.

A *suspect* died of a SIGKILL that did not come from the watcher. The proof is the counter `oom_kill` of the watcher's memory
cgroup, which the kernel increments before it kills a process: if it rose by at least the number of suspects in one wake-up,
the OOM killer killed all of them, and maybe other processes.
"""

from collections import Counter
from collections.abc import Iterable

from mpwatch.os_support.cgroups import count_oom_kills
from mpwatch.watcher.diagnosis.observations import RankObservations


class OomDetector:
    """Create it before the ranks are started."""

    def __init__(self) -> None:
        self._group_counts = count_oom_kills()
        self._other_kills: Counter[str] = Counter()  # kills of processes that are no ranks, by the counter's file

    def add_suspects(self, suspects: Iterable[RankObservations]) -> None:
        """Record what the counters say of these suspects. Call it right after their deaths: later kills count, too."""
        killed = list(suspects)
        if not killed:
            return
        file, rise = self._read_rise()
        self._other_kills[file] += max(0, rise - len(killed))
        for observed in killed:
            if rise >= len(killed):
                observed.oom_proof = _describe_rise(file, rise)

    def take_other_kills(self) -> str:
        """Return a text about OOM kills of other processes since the last call. Empty if there were none."""
        file, rise = self._read_rise()
        self._other_kills[file] += rise
        others, self._other_kills = self._other_kills, Counter()
        return "; ".join(_describe_rise(file, times) for file, times in others.items() if times)

    def _read_rise(self) -> tuple[str, int]:
        """Return the counter that rose most since the last call, and by how much."""
        now = count_oom_kills()
        rises = [(count - self._group_counts.get(file, count), file) for file, count in now.items()]
        self._group_counts = now
        rise, file = max(rises, default=(0, ""))
        return file, rise


def _describe_rise(file: str, times: int) -> str:
    return f"oom_kill in {file} rose by {times} during the run"
