"""Compares the stacks of all ranks to find those that keep the others waiting in a collective. Pure.

A rank in a collective waits for ranks that have not entered it, so those in no collective are blamed: also a rank whose
process cannot run (BLOCKED_STATES) and so has no stacks. If all ranks are in collectives, the majority decides: with three
of four ranks in `all_reduce`, the one in `broadcast` is blamed. If none is in a collective, nobody is blamed.
"""

import re
from collections import Counter
from collections.abc import Mapping

from mpwatch.results.places import parse_frames
from mpwatch.watcher.diagnosis.observations import RankObservations

# Python files of torch from which C++ code is called that waits for peers.
COLLECTIVE_FILES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
# Reads and writes files. Its collectives are called from other files.
CHECKPOINT_FILES = "/torch/distributed/checkpoint/"
POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}  # the two sides call different functions
DISPATCH_FILES = ("/torch/_ops.py", "/torch/_library/")  # functional collectives and DTensors call collectives through these
MAY_WAIT_FILES = ("/torch/autograd/", "/torch/cuda/")  # wait for buckets of gradients and for streams, among other things
MAY_WAIT_LINE = re.compile(r"\.(wait|synchronize|item|cpu|get|barrier|monitored_barrier)\(")
# Why a process that is not asleep writes no stacks, by the letter of its state in /proc.
BLOCKED_STATES = {
    "T": "suspended, by SIGSTOP or SIGTSTP",
    "t": "held by a debugger",
    "D": "waiting for a device, in the kernel",
}


def find_stragglers(running: Mapping[int, RankObservations]) -> set[int]:
    inside = {rank: name for rank, observed in running.items() if (name := _get_collective(observed))}
    if not inside:
        return set()
    outside = find_ranks_outside_collectives(running)
    if outside or len(inside) < len(running):
        return outside
    name, count = Counter(inside.values()).most_common(1)[0]
    is_majority = count > len(inside) - count and not POINT_TO_POINT & set(inside.values())
    return {rank for rank in inside if inside[rank] != name} if is_majority else set()


def find_cause_of_silence(running: Mapping[int, RankObservations], silent: set[int]) -> set[int]:
    """Compare the silent ranks with each other, and then, if they wait in one collective, with all running ranks."""
    silent_ranks = {rank: running[rank] for rank in silent}
    outside = find_ranks_outside_collectives(silent_ranks)
    if stragglers := find_stragglers(silent_ranks) or (outside if len(outside) < len(silent_ranks) else set()):
        return stragglers
    names = {_get_collective(observed) for observed in silent_ranks.values()}
    return find_stragglers(running) if len(names - {""}) == 1 else set()


def find_ranks_outside_collectives(running: Mapping[int, RankObservations]) -> set[int]:
    """Return the ranks that were certainly in no collective."""
    return {rank for rank, observed in running.items() if _is_outside_collectives(observed)}


def is_in_collective(observed: RankObservations) -> bool:
    return bool(_get_collective(observed))


def get_stacks_or_state(observed: RankObservations) -> str:
    """Return the rank's stacks, or why it has written none, such as "starting", or an empty text."""
    return observed.stacks or describe_blocked_process(observed) or ("" if observed.was_ready else "starting")


def describe_blocked_process(observed: RankObservations) -> str:
    return BLOCKED_STATES.get(observed.process_state, "")


def _is_outside_collectives(observed: RankObservations) -> bool:
    innermost = next(parse_frames(observed.stacks), None)
    if innermost is None:
        return observed.process_state in BLOCKED_STATES
    source = innermost.source
    may_wait = (
        not source
        or MAY_WAIT_LINE.search(source)
        or any(part in innermost.file for part in (*DISPATCH_FILES, *MAY_WAIT_FILES))
    )
    return not may_wait and not any(_find_collective(thread) for thread in observed.stacks.split("\n\n"))


def _get_collective(observed: RankObservations) -> str:
    return _find_collective(observed.stacks)


def _find_collective(stacks: str) -> str:
    for frame in parse_frames(stacks):
        if any(part in frame.file for part in COLLECTIVE_FILES) and CHECKPOINT_FILES not in frame.file:
            return frame.function
        if not any(part in frame.file for part in DISPATCH_FILES):
            break
    return ""
