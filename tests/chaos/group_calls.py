"""Histories of calls of a WorkerGroup, each made from a seed: which ranks each call needs, what they do, who stops it.

`run_history` runs one in this process, and returns the errors: outcomes that mpwatch does not promise. Each rank gets its own
number by PerRank. The calls need random ranks.
"""

import random
import signal
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass

import mpwatch
from mpwatch import PerRank, RunFailedError, WorkerState
from support.acts import act

NPROCS = 3
ACTIONS = ["returns"] * 12 + ["raises"] * 2 + ["waits"] * 2 + ["is_killed", "exits"]
CAUSES = {"raises": "ValueError", "exits": "SystemExit", "is_killed": signal.SIGKILL}


@dataclass(frozen=True)
class PlannedCall:
    """One call. `culprit` is the rank that does it; the other ranks of the call return."""

    number: int
    ranks: tuple[int, ...]
    action: str
    culprit: int
    pause: float  # seconds before the call is made
    stop_after: float | None  # seconds from the call to `stop`, or to `cancel` if is_cancelled
    is_cancelled: bool


def make_history(seed):
    dice = random.Random(seed)
    calls = []
    for number in range(dice.randint(5, 25)):
        ranks = tuple(sorted(dice.sample(range(NPROCS), dice.choice([1, 1, 2, NPROCS]))))
        action = dice.choice(ACTIONS)
        is_stopped = action == "waits" or dice.random() < 0.15
        stop_after = dice.choice([0.0, 0.001, 0.02]) if is_stopped else None
        pause = dice.choice([0.0, 0.0, 0.0, 0.001, 0.01])
        is_cancelled = is_stopped and action != "waits" and dice.random() < 0.5
        calls.append(PlannedCall(number, ranks, action, dice.choice(ranks), pause, stop_after, is_cancelled))
    return calls


def be_called(planned, own):
    me = mpwatch.current_worker()
    numbers = me.state.setdefault("numbers", [])
    numbers.append(planned.number)
    if me.rank == planned.culprit:
        act(planned.action)
    return me.restart_count, own, list(numbers)


def run_history(calls):
    outcomes, errors = {}, []
    with ThreadPoolExecutor(len(calls)) as threads, mpwatch.WorkerGroup(NPROCS, grace_period=5.0) as group:
        futures = {}
        for planned in calls:
            time.sleep(planned.pause)
            args = (planned, PerRank([100 * planned.number + rank for rank in planned.ranks]))
            futures[planned] = handle = group.submit(be_called, args, ranks=planned.ranks)
            if planned.stop_after is not None:
                threads.submit(stop_later, handle, planned)
        for planned, future in futures.items():
            try:
                outcomes[planned] = future.result(60)
            except (RunFailedError, CancelledError, TimeoutError) as error:
                outcomes[planned] = error
            if error := find_error(planned, outcomes[planned], calls):
                errors.append(f"{planned}: {error}")
    return errors + find_wrong_order(outcomes)


def stop_later(handle, planned):
    time.sleep(planned.stop_after)
    (handle.cancel if planned.is_cancelled else handle.terminate)()


def find_error(planned, outcome, calls):
    if isinstance(outcome, CancelledError):
        return None if planned.stop_after is not None else "it was cancelled by nobody"
    if isinstance(outcome, TimeoutError):
        return "it hangs"
    if isinstance(outcome, RunFailedError):
        return find_error_of_failure(planned, outcome, calls)
    owns = {rank: own for rank, (_, own, _) in outcome.return_values.items()}
    is_right = planned.action == "returns" and owns == {rank: 100 * planned.number + rank for rank in planned.ranks}
    return None if is_right else f"it has returned {owns}"


def find_error_of_failure(planned, error, calls):
    text, root = str(error), error.root_cause
    if error.result.state is WorkerState.STOPPED and root is None:
        if "terminate() was called" in text:
            return None if planned.stop_after is not None and not planned.is_cancelled else f"nobody has stopped it: {text}"
        # an interrupted rank may also end its process, and then all others
        ends = any(call.action in ("is_killed", "exits", "waits") or call.stop_after is not None for call in calls)
        return None if "which it had not called" in text and ends else f"it was stopped: {text}"
    if root is None:
        return f"no root cause: {text}"
    if planned.stop_after is not None and "KeyboardInterrupt" in text:
        return None  # it was interrupted
    if root.rank != planned.culprit or planned.action in ("returns", "waits"):
        return f"the root cause is {text}"
    found = root.signal or type(error.__cause__).__name__
    return None if found == CAUSES[planned.action] else f"the cause is {found}: {text}"


def find_wrong_order(outcomes):
    """Calls of the same process of a rank run in their order."""
    ran = [(planned.number, outcome) for planned, outcome in outcomes.items() if not isinstance(outcome, Exception)]
    return [
        f"call {number}: rank {rank} has run the calls {numbers}"
        for number, outcome in ran
        for rank, (_, _, numbers) in outcome.return_values.items()
        if numbers != sorted(set(numbers))
    ]
