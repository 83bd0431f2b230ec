"""Who keeps the others waiting: stacks of ranks, taken at one moment, in; the ranks to blame out. Pure.

A rank that waits in a collective is the victim of one that is not there. Who that is, is said only if it is certain:
somebody was seen in a collective, and somebody else at what is no waiting for peers, or in another collective than most.
"""

import re
from collections import Counter
from collections.abc import Mapping

from mpwatch.watcher.diagnosis.observations import RankObservations
from mpwatch.watcher.diagnosis.stack_dumps import frames_of

# Where a rank waits for its peers: C code of torch, called from these files; or maybe, by a line like this.
COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
WORK = "/torch/distributed/checkpoint/"  # writes and reads files there, and calls its collectives from elsewhere
POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}  # not the same on both sides
PLUMBING = ("/torch/_ops.py", "/torch/_library/")  # through which functional collectives and DTensors call theirs
PERHAPS = ("/torch/autograd/", "/torch/cuda/")  # where buckets of gradients are waited for, and streams
WAITING_LINE = re.compile(r"\.(wait|synchronize|item|cpu|get|barrier|monitored_barrier)\(")
HELD = {  # why a process does not run that is not asleep, by the letter of its state
    "T": "suspended, by SIGSTOP or SIGTSTP",
    "t": "held by a debugger",
    "D": "waiting for a device, in the kernel",
}


def culprits(at_work: Mapping[int, RankObservations]) -> set[int]:
    """Of the ranks that were at work at the same moment: those that the others wait for. None if that is not certain."""
    inside = {rank: name for rank, observed in at_work.items() if (name := _collective(observed))}
    if not inside:
        return set()
    outside = away(at_work)
    if outside or len(inside) < len(at_work):
        return outside
    name, count = Counter(inside.values()).most_common(1)[0]
    is_majority = count > len(inside) - count and not POINT_TO_POINT & set(inside.values())
    return {rank for rank in inside if inside[rank] != name} if is_majority else set()


def culprits_of_silence(at_work: Mapping[int, RankObservations], silent: set[int]) -> set[int]:
    """Rather one of the silent; one that has beaten, only if all who were silent wait in one and the same collective."""
    stuck = {rank: at_work[rank] for rank in silent}
    outside = away(stuck)
    if found := culprits(stuck) or (outside if len(outside) < len(stuck) else set()):
        return found
    names = {_collective(observed) for observed in stuck.values()}
    return culprits(at_work) if len(names - {""}) == 1 else set()


def away(at_work: Mapping[int, RankObservations]) -> set[int]:
    """Those that were certainly doing something else than waiting for peers."""
    return {rank for rank, observed in at_work.items() if _is_away(observed)}


def is_waiting(observed: RankObservations) -> bool:
    """Whether it was certainly waiting for peers."""
    return bool(_collective(observed))


def stacks_of(observed: RankObservations) -> str:
    """Where it was; or why that is not known."""
    if observed.stacks:
        return observed.stacks
    return HELD.get(observed.process_state, "")


def _is_away(observed: RankObservations) -> bool:
    frames = list(frames_of(observed.stacks))
    if not frames:
        return observed.process_state in HELD
    file, _, line = frames[0]
    may_wait = not line or WAITING_LINE.search(line) or any(part in file for part in (*PLUMBING, *PERHAPS))
    return not may_wait and not any(_collective_in(thread) for thread in observed.stacks.split("\n\n"))


def _collective(observed: RankObservations) -> str:
    """The function of torch.distributed that its main thread was in; empty if it was in none."""
    return _collective_in(observed.stacks.partition("\n\n")[0])


def _collective_in(thread: str) -> str:
    for file, function, _ in frames_of(thread):
        if any(part in file for part in COLLECTIVES) and WORK not in file:
            return function
        if not any(part in file for part in PLUMBING):
            break
    return ""
