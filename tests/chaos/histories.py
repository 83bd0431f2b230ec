"""Histories of runs, each made from a seed: the number of ranks, the action of each rank, and the fault of the watcher.

Pure data. The actions are defined in support/acts.py. ACTIONS says what mpwatch promises to report for each. judge.py compares each
run with that. So the table follows from the promises, and not from what mpwatch happens to do.
"""

import random
import signal
from dataclasses import dataclass
from enum import Enum, auto

from support.acts import EXIT_CODE


class Fate(Enum):
    """The effect of an action on the run."""

    FAILS = auto()
    WAITS = auto()  # until the rank is stopped
    RETURNS = auto()
    NEVER_EXITS = auto()  # the function returns, but the process does not exit


@dataclass(frozen=True)
class Action:
    """An action of one rank. For a failure: the kind, exit code and exception that mpwatch must report."""

    fate: Fate
    kind: str = ""
    exit_code: int = 1
    exception: str = ""  # the name of the type; empty: the rank dies without an exception


def _killed_by(number: int) -> Action:
    return Action(Fate.FAILS, "SIGNAL", 128 + number)


RAISES = Action(Fate.FAILS, "EXCEPTION", 1, "ValueError")
EXITS, KILLED = Action(Fate.FAILS, "EXIT", EXIT_CODE), _killed_by(signal.SIGKILL)
WAITS, RETURNS, NEVER_EXITS = Action(Fate.WAITS), Action(Fate.RETURNS), Action(Fate.NEVER_EXITS)
ACTIONS = {
    "raises": RAISES,
    "raises_keyword_only_error": Action(Fate.FAILS, "EXCEPTION", 1, "KeywordOnlyError"),
    "raises_a_deep_chain": Action(Fate.FAILS, "EXCEPTION", 1, "RuntimeError"),
    "raises_keyboard_interrupt": Action(Fate.FAILS, "EXCEPTION", 1, "KeyboardInterrupt"),
    "exits": Action(Fate.FAILS, "EXIT", EXIT_CODE, "SystemExit"),
    "returns_a_lock": Action(Fate.FAILS, "EXCEPTION", 1, "TypeError"),
    "leaves_a_thread and raises": RAISES,
    "hangs_at_exit and raises": RAISES,
    "closes_stderr and raises": RAISES,
    "changes_handlers and raises": RAISES,
    "blocks_signals and raises": RAISES,
    "leaves_its_process_group and raises": RAISES,
    "starts_helpers and raises": RAISES,
    "calls_os_exit": EXITS,
    "calls_os_exit_with_0": Action(Fate.FAILS, "LOST"),
    "execs_a_program_that_fails": EXITS,
    "is_killed": KILLED,
    "crashes": _killed_by(signal.SIGSEGV),
    "aborts": _killed_by(signal.SIGABRT),
    "forks and is_killed": KILLED,
    "forks and sends_half_a_message and is_killed": KILLED,
    "waits": WAITS,
    "suspends_itself": WAITS,
    "holds_the_gil": WAITS,
    "execs_a_program_that_waits": WAITS,
    "ignores_sigterm_and_sigint and waits": WAITS,
    "blocks_signals and waits": WAITS,
    "changes_handlers and waits": WAITS,
    "leaves_its_process_group and waits": WAITS,
    "starts_helpers and waits": WAITS,
    "forks and waits": WAITS,
    "sends_half_a_message and waits": WAITS,
    "exits_with_0_at_sigterm and waits": WAITS,
    "raises_at_sigterm and waits": WAITS,
    "returns": RETURNS,
    "exits_with_0": RETURNS,
    "changes_handlers and returns": RETURNS,
    "starts_helpers and returns": RETURNS,
    "leaves_a_thread and returns": NEVER_EXITS,
    "hangs_at_exit and returns": NEVER_EXITS,
}


class Fault(Enum):
    """A fault that is injected into the host program or its guardian. The value lists the signals that the harness sends."""

    INTERRUPT = (signal.SIGINT,)
    INTERRUPT_TWICE = (signal.SIGINT, signal.SIGINT)
    TERMINATE = (signal.SIGTERM,)
    TERMINATE_HANDLED = (signal.SIGTERM, "the host program has a handler, which raises SystemExit")
    HANG_UP = (signal.SIGHUP,)
    KILL = (signal.SIGKILL,)
    SUSPEND = (signal.SIGSTOP, signal.SIGCONT)
    TIMER = ("the host program has a timer, and a handler that raises",)
    KILL_GUARDIAN = ("the guardian is killed",)
    IN_A_THREAD = ("no fault: run is not called in the main thread",)

    @property
    def signals(self) -> list[int]:
        return [item for item in self.value if isinstance(item, int)]


ENDS_THE_RUN = frozenset(Fault) - {Fault.SUSPEND, Fault.KILL_GUARDIAN, Fault.IN_A_THREAD}


@dataclass(frozen=True)
class RankPlan:
    """What one rank does, and when: as soon as its function is called, or `delay` seconds after all ranks should run."""

    action: str
    at_once: bool = False
    delay: float = 0.0

    @property
    def promised(self) -> Action:
        return ACTIONS[self.action]


@dataclass(frozen=True)
class History:
    """One run. `plans` is ordered by rank."""

    seed: int
    grace_period: float
    plans: tuple[RankPlan, ...]
    fault: Fault | None = None
    fault_at: float = 0.0  # seconds after the call of `run`, or after the start of the interpreter
    gap: float = 0.0  # seconds to the second signal of the fault
    from_interpreter: bool = False
    restart_scope: str = ""  # "group" or "worker": restarted after each failure, without limit
    restart_delay: float = 0.0  # seconds


def make_history(seed: int) -> History:
    """Return the history of a seed. It ends by itself or by its fault."""
    rng = random.Random(seed)
    nprocs = rng.randint(2, 8)
    fault = rng.choice(list(Fault)) if rng.random() < 0.45 else None
    makers = [_make_failing, _make_failing, _make_failing, _make_succeeding]
    if fault in ENDS_THE_RUN:
        makers += [_make_waiting, _make_waiting]
    names = rng.choice(makers)(rng, nprocs)
    rng.shuffle(names)
    plans = tuple(RankPlan(name, rng.random() < 0.3, rng.uniform(0.0, rng.choice((0.02, 0.5)))) for name in names)
    return History(seed, rng.uniform(0.3, 1.0), plans, fault, rng.uniform(0.0, 0.7), rng.uniform(0.0, 0.4))


def make_interrupted_start(seed: int, fault: Fault, longest: float) -> History:
    """Return a history with a fault at any time after the start of the interpreter. Its ranks wait, one with helper processes."""
    plans = (RankPlan("waits"), RankPlan("starts_helpers and waits", at_once=True), RankPlan("waits"))
    return History(seed, 0.5, plans, fault, random.Random(seed).uniform(0.0, longest), from_interpreter=True)


def make_interrupted_restarts(seed: int, fault: Fault, longest: float) -> History:
    """Return a history with a fault at any time during restarts. One or two of its ranks always fail soon."""
    rng = random.Random(seed)
    failing = [RankPlan(rng.choice(("raises", "is_killed", "exits")), at_once=True) for _ in range(rng.choice((1, 1, 2)))]
    plans = (RankPlan("starts_helpers and waits", at_once=True), *failing, RankPlan("waits"))
    restarts = {"restart_scope": rng.choice(("group", "worker")), "restart_delay": rng.choice((0.0, 0.0, 0.05))}
    return History(seed, 0.5, plans, fault, rng.uniform(0.2, longest), **restarts)


def _make_failing(rng: random.Random, nprocs: int) -> list[str]:
    failing = rng.choices(_select_actions(Fate.FAILS), k=min(nprocs, rng.choice((1, 1, 1, 2, 3))))
    return failing + _other_actions(rng, nprocs - len(failing))


def _make_waiting(rng: random.Random, nprocs: int) -> list[str]:
    return ["waits", *_other_actions(rng, nprocs - 1)]


def _other_actions(rng: random.Random, number: int) -> list[str]:
    other = _select_actions(Fate.WAITS, Fate.RETURNS, Fate.NEVER_EXITS)
    return [rng.choice(other) if rng.random() < 0.5 else "waits" for _ in range(number)]


def _make_succeeding(rng: random.Random, nprocs: int) -> list[str]:
    hanging = (Fate.NEVER_EXITS,) if rng.random() < 0.3 else ()
    return rng.choices(_select_actions(Fate.RETURNS, *hanging), k=nprocs)


def _select_actions(*fates: Fate) -> list[str]:
    return [name for name, action in ACTIONS.items() if action.fate in fates]
