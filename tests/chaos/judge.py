"""What was wrong with a run, in words: a history and what was seen of it in, complaints out. Pure.

Only what the promises say is asked for. Where two things happened too close together for anybody to tell which was first,
either is right.
"""

from acts import DEPTH, value_of
from harness import Evidence
from histories import ACTS, DEATH_IS_HEARD_OF_LATER, ENDS_THE_RUN, Blow, Fate, History, Part

__all__ = ["complaints_about", "left_over", "over_the_bound"]

TIE = 0.02  # seconds between two failures, in which either may be first: a rank that is not running cannot fail
CLEAR = 0.5  # so much before a blow, a failure has been heard of
EDGE = 0.05  # so close to the end of the run, a blow may be the program's and no more the run's
STOPPING = 1.0  # what the promise gives beyond the grace period
SLACK = 1.5  # for a loaded machine
SOFT = {Blow.INTERRUPT: -2, Blow.INTERRUPT_TWICE: -2, Blow.TERMINATE: -15, Blow.TERMINATE_HANDLED: 143, Blow.HANG_UP: -1}
OUTCOMES = {-2: "KeyboardInterrupt", 143: "SystemExit"}  # of a program that gets to say so


def complaints_about(history: History, seen: Evidence) -> list[str]:
    """Everything that is wrong."""
    if seen.dump:
        return [f"it hangs: {seen.dump}", *left_over(history, seen)]
    verdict = [] if history.blow is Blow.KILL else _verdict(history, seen)
    return verdict + left_over(history, seen) + _late(history, seen)


def left_over(history: History, seen: Evidence) -> list[str]:
    """What has not gone, or has been changed."""
    complaints = [f"left 1 s after the end: {process}" for process in seen.left]
    if history.blow is not Blow.KILL:
        complaints += [f"left at the end: {process}" for process in seen.left_at_once]
        complaints += [f"left in the folder for temporary files: {file}" for file in seen.files]
    changed = seen.said["changed"] if seen.said else {}
    return complaints + [f"{name} changed from {before} to {after}" for name, (before, after) in changed.items()]


def over_the_bound(history: History, seen: Evidence) -> float | None:
    """Seconds from when the run should have ended to when it did; negative if it was early. None if it cannot be said."""
    if history.blow is Blow.KILL:
        return seen.cleared - seen.struck[0] - STOPPING
    due = _due(history, seen)
    return None if due is None else (seen.ended or seen.exited) - due


def _late(history: History, seen: Evidence) -> list[str]:
    over = over_the_bound(history, seen)
    late = over is not None and over > SLACK and history.blow is not Blow.KILL  # of which `left` speaks
    return [f"it took {over:.2f} s longer than it may"] if late else []


def _due(history: History, seen: Evidence) -> float | None:
    """When the run has to be over: so long after the first thing that ends it."""
    reasons = list(_failing(history, seen).values())
    grace, blows = history.grace_period, _blows(history, seen)
    if history.blow is Blow.INTERRUPT_TWICE and len(blows) > 1:
        return max(blows[0], min(blows[1], blows[0] + grace)) + STOPPING  # the second one says: at once
    if blows:
        reasons.append(blows[0])
    lingering = 0.0
    if not reasons and len(seen.ranks) == len(history.parts):
        reasons.append(max(seen.ranks.values()))
        lingering = grace if any(part.fate is Fate.LINGERS for part in history.parts) else 0.0
    if not reasons:
        return None
    start = min(reasons)
    if history.blow is Blow.SUSPEND and len(seen.struck) > 1 and start < seen.struck[1]:
        start = seen.struck[1]  # until then nobody could do anything
    return start + lingering + grace + STOPPING


def _failing(history: History, seen: Evidence) -> dict[int, float]:
    """The ranks that have failed, and when."""
    return {rank: at for rank, at in seen.ranks.items() if history.parts[rank].fate is Fate.FAILS}


def _blows(history: History, seen: Evidence) -> list[float]:
    """When the run was ended from outside."""
    times = [] if history.blow not in ENDS_THE_RUN else seen.struck if history.blow is not Blow.ALARM else [seen.rang]
    return [at for at in times if at is not None and (seen.ended is None or at <= seen.ended)]


def _verdict(history: History, seen: Evidence) -> list[str]:
    blows = _blows(history, seen)
    if seen.said is None:
        return _wordless(history, seen)
    if blows and not (
        seen.ended is not None and blows[0] > seen.ended - EDGE and seen.said["outcome"] in _unstruck(history)
    ):
        return _struck(history, seen, blows[0])
    if any(part.fate is Fate.FAILS for part in history.parts):
        return _failure(history, seen, seen.said) + _status(history, seen, 1)
    return _success(history, seen, seen.said)


def _unstruck(history: History) -> tuple[str, ...]:
    return ("RunFailedError",) if any(part.fate is Fate.FAILS for part in history.parts) else ("returned",)


def _wordless(history: History, seen: Evidence) -> list[str]:
    """A program that a signal ended says nothing. One that was interrupted while it spoke may not, either."""
    status = SOFT.get(history.blow) if history.blow else None
    if status in (None, 143) and not (status == 143 and _was_struck_at_the_edge(seen)):
        return [f"the program ended with status {seen.status} and said nothing: {seen.err[-3000:]}"]
    if status == -2 and not _was_struck_at_the_edge(seen):
        return [f"an interrupted program said nothing: {seen.err[-3000:]}"]
    return _status(history, seen, status)


def _was_struck_at_the_edge(seen: Evidence) -> bool:
    """Before the call, or after it."""
    began, ended = seen.began, seen.ended
    return any(began is None or at < began + EDGE or (ended is not None and at > ended - EDGE) for at in seen.struck)


def _struck(history: History, seen: Evidence, at: float) -> list[str]:
    """The signal does what it would have done, and what had failed before it is kept."""
    said = seen.said or {}
    if history.blow is Blow.ALARM:
        # where code of the user's may raise, too, it counts as raised there, and is the cause of what comes out
        return [] if "AlarmError" in said["chain"] else [f"the timer's exception was lost: {said['chain']}"]
    status = SOFT[history.blow]
    expected = OUTCOMES.get(status)
    if said["outcome"] != expected:
        return [f"after {history.blow.name}, run ended with {said['outcome']} and not with {expected}: {said.get('text')}"]
    complaints = _status(history, seen, status)
    failing = {rank: when for rank, when in _failing(history, seen).items() if when < at}
    if "root" in said:
        return complaints + _failure(history, seen, said)
    early = {rank: when for rank, when in failing.items() if when + CLEAR < at}
    return complaints + [f"ranks {sorted(early)} had failed long before the signal, and nothing is said of it"] * bool(early)


def _status(history: History, seen: Evidence, expected: int | None) -> list[str]:
    right = {expected}
    if history.blow is not None and _was_struck_at_the_edge(seen):  # as the interpreter ends, handlers are no more
        right |= {SOFT.get(history.blow), *(-number for number in history.blow.signals)}
    return (
        []
        if seen.status in right
        else [f"the program ended with status {seen.status} and not {expected}: {seen.err[-3000:]}"]
    )


def _success(history: History, seen: Evidence, said: dict) -> list[str]:
    if said["outcome"] != "returned":
        return [f"nobody failed, and yet: {said['outcome']}: {said.get('text')}"]
    expected = [None if part.act == "exits_well" else value_of(rank) for rank, part in enumerate(history.parts)]
    complaints = [] if said["values"] == expected else [f"the values are {said['values']}"]
    if set(said["states"].values()) != {"SUCCEEDED"}:
        complaints.append(f"not all ranks are said to have succeeded: {said['states']}")
    return complaints + _status(history, seen, 0)


def _failure(history: History, seen: Evidence, said: dict) -> list[str]:
    if "failures" not in said:
        return [f"a rank failed, and yet run ended with {said['outcome']}: {said.get('text') or said.get('values')}"]
    failing = _failing(history, seen)
    complaints = []
    for rank, told in said["failures"].items():
        if rank not in failing:
            complaints.append(f"rank {rank} is said to have failed, and did not: {told}")
        else:
            complaints += _wrong_words(rank, history.parts[rank], told)
    root = said["root"]
    right = _first(history, failing)
    if root not in right:
        return [*complaints, f"rank {root} is blamed, and not one of {right}: {said['verdict']}; {_when(history, seen)}"]
    if said["exit_code"] != history.parts[root].exit_code:
        complaints.append(f"the exit code is {said['exit_code']}")
    if history.parts[root].act == "raises_a_deep_chain" and said["links"] != DEPTH:
        complaints.append(f"the chain of rank {root} has {said['links']} links and not {DEPTH}")
    return complaints + _wrong_states(history, said)


def _wrong_words(rank: int, part: Part, told: dict) -> list[str]:
    act = ACTS[part.act]
    expected = {"kind": act.kind, "exit_code": part.exit_code, "exception": act.exception, "is_secondary": False}
    return [f"rank {rank} {part.act}: {name} is {told[name]}" for name, right in expected.items() if told[name] != right]


def _wrong_states(history: History, said: dict) -> list[str]:
    complaints = []
    for rank, state in said["states"].items():
        returns = history.parts[rank].fate in (Fate.RETURNS, Fate.LINGERS)
        right = ("FAILED",) if rank in said["failures"] else ("STOPPED", "SUCCEEDED") if returns else ("STOPPED",)
        if state not in right:
            complaints.append(f"rank {rank} {history.parts[rank].act} is said to be {state}")
    return complaints


def _first(history: History, failing: dict[int, float]) -> list[int]:
    """Whoever may be blamed: before whom nobody has failed for certain."""
    return [rank for rank in failing if not any(_is_before(history, failing, other, rank) for other in failing)]


def _is_before(history: History, failing: dict[int, float], one: int, other: int) -> bool:
    mute = {rank: ACTS[history.parts[rank].act].is_mute for rank in (one, other)}
    lag = DEATH_IS_HEARD_OF_LATER if mute[one] and not mute[other] else TIE
    return failing[one] + lag < failing[other]


def _when(history: History, seen: Evidence) -> str:
    first = min(seen.ranks.values())
    return ", ".join(f"rank {r} {history.parts[r].act} {1000 * (t - first):.1f} ms" for r, t in sorted(seen.ranks.items()))
