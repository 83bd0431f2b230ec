"""Who keeps the others waiting: stacks of ranks, taken at one moment, in; the ranks to blame out. Pure but for source lines.

A rank that waits in a collective is the victim of one that is not there. Who that is, is said only if it is certain:
somebody was seen in a collective, and somebody else at what is no waiting for peers, or in another collective than most.
"""

import re
from collections import Counter
from collections.abc import Mapping

from .facts import RankFacts
from .stacks import innermost, with_sources

__all__ = ["HELD", "away", "culprits", "stacks_of"]

# Where a rank waits for its peers: C code of torch, called from these files; or maybe, by a line like this.
COLLECTIVES = "/torch/distributed/"
AUTOGRAD = "/torch/autograd/"  # DistributedDataParallel waits for its buckets there
WAITING_LINE = re.compile(r"\.(wait|synchronize|item|cpu|get|barrier|monitored_barrier)\(")
HELD = {  # why a process does not run that is not asleep, by the letter of its state
    "T": "suspended, by SIGSTOP or SIGTSTP",
    "t": "held by a debugger",
    "D": "waiting for a device, in the kernel",
}


def culprits(at_work: Mapping[int, RankFacts]) -> set[int]:
    """Of the ranks that were at work at the same moment: those that the others wait for. None if that is not certain."""
    inside = {rank: name for rank, seen in at_work.items() if (name := _collective(seen))}
    if not inside:
        return set()
    outside = away(at_work)
    if outside or len(inside) < len(at_work):
        return outside
    name, count = Counter(inside.values()).most_common(1)[0]
    is_majority = count > len(inside) - count
    return {rank for rank in inside if inside[rank] != name} if is_majority else set()


def away(at_work: Mapping[int, RankFacts]) -> set[int]:
    """Those that were certainly doing something else than waiting for peers."""
    return {rank for rank, seen in at_work.items() if _is_away(seen)}


def stacks_of(seen: RankFacts) -> str:
    """Where it was; or why that is not known."""
    if seen.stacks:
        return with_sources(seen.stacks)
    return HELD.get(seen.process_state, "")


def _is_away(seen: RankFacts) -> bool:
    file, _, line = innermost(with_sources(seen.stacks))
    if not file:
        return seen.process_state in HELD
    return bool(line) and not WAITING_LINE.search(line) and COLLECTIVES not in file and AUTOGRAD not in file


def _collective(seen: RankFacts) -> str:
    """The function of torch.distributed that it was in; empty if it was in none."""
    file, function, _ = innermost(with_sources(seen.stacks))
    return function if COLLECTIVES in file else ""
