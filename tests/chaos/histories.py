"""Histories of runs, each made from a seed: the number of ranks, the action of each rank, and the fault of the watcher.

Pure data. The actions are defined in acts.py. ACTIONS says what mpwatch promises to report for each. judge.py compares each
run with that. So the table follows from the promises, and not from what mpwatch happens to do.
"""

import random
import signal
from dataclasses import dataclass
from enum import Enum, auto

DEATH_REPORT_DELAY = 0.1  # seconds by which the report of a death may arrive later than the report of an exception


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
    exit_code: int | None = None  # None: the number of the RankPlan
    exception: str = ""  # the name of the type; empty: the rank dies without an exception

    @property
    def has_no_exception(self) -> bool:
        return not self.exception


def _raising(exception: str = "ValueError") -> Action:
    return Action(Fate.FAILS, "EXCEPTION", 1, exception)


def _killed_by(number: int) -> Action:
    return Action(Fate.FAILS, "SIGNAL", 128 + number)


WAITS, RETURNS, NEVER_EXITS = Action(Fate.WAITS), Action(Fate.RETURNS), Action(Fate.NEVER_EXITS)
KILLED = _killed_by(signal.SIGKILL)
ACTIONS = {
    "raises": _raising(),
    "raises_keyword_only_error": _raising("KeywordOnlyError"),
    "raises_a_deep_chain": _raising("RuntimeError"),
    "raises_keyboard_interrupt": _raising("KeyboardInterrupt"),
    "exits": Action(Fate.FAILS, "EXIT", None, "SystemExit"),
    "returns_a_lock": _raising("TypeError"),
    "leaves_a_thread and raises": _raising(),
    "hangs_at_exit and raises": _raising(),
    "closes_stderr and raises": _raising(),
    "changes_handlers and raises": _raising(),
    "blocks_signals and raises": _raising(),
    "leaves_its_process_group and raises": _raising(),
    "starts_helpers and raises": _raising(),
    "calls_os_exit": Action(Fate.FAILS, "EXIT", None),
    "calls_os_exit_with_0": Action(Fate.FAILS, "LOST", 1),
    "execs_a_program_that_fails": Action(Fate.FAILS, "EXIT", None),
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
class Injection:
    """A fault and its time, in seconds after the call of `run`, or after the start of the interpreter."""

    fault: Fault
    at: float
    gap: float  # seconds to its second signal, if it has one
    from_interpreter: bool = False


@dataclass(frozen=True)
class RankPlan:
    """What one rank does, and when: as soon as its function is called, or `delay` seconds after all ranks run."""

    action: str
    at_once: bool = False
    delay: float = 0.0
    number: int = 1  # the exit code, for the actions that need one

    @property
    def fate(self) -> Fate:
        return ACTIONS[self.action].fate

    @property
    def exit_code(self) -> int:
        code = ACTIONS[self.action].exit_code
        return self.number if code is None else code


@dataclass(frozen=True)
class History:
    """One run. `plans` is ordered by rank."""

    seed: int
    grace_period: float
    plans: tuple[RankPlan, ...]
    injection: Injection | None
    restart_scope: str = ""  # "group" or "worker": restarted after each failure, without limit
    restart_delay: float = 0.0  # seconds

    @property
    def fault(self) -> Fault | None:
        return self.injection.fault if self.injection else None

    def __str__(self) -> str:
        lines = [f"history {self.seed}: {len(self.plans)} ranks, grace_period={self.grace_period:.2f}"]
        if self.restart_scope:
            lines.append(f"  the {self.restart_scope} is restarted {1000 * self.restart_delay:.0f} ms after each failure")
        for rank, plan in enumerate(self.plans):
            when = "at once" if plan.at_once else f"{1000 * plan.delay:.0f} ms after all ranks ran"
            lines.append(f"  rank {rank} {plan.action} ({plan.number}), {when}")
        if self.injection is not None:
            since = "the interpreter's start" if self.injection.from_interpreter else "the call"
            lines.append(
                f"  the watcher: {self.injection.fault.name}, {self.injection.at:.3f} s after {since}, {self.injection.gap:.3f}"
            )
        return "\n".join(lines)


def make_history(seed: int) -> History:
    """Return the history of a seed. It ends by itself or by its fault."""
    rng = random.Random(seed)
    nprocs = rng.randint(2, 8)
    injection = None
    if rng.random() < 0.45:
        injection = Injection(rng.choice(list(Fault)), at=rng.uniform(0.0, 0.6), gap=rng.uniform(0.0, 0.4))
    makers = [_make_failing, _make_failing, _make_failing, _make_succeeding]
    if injection is not None and injection.fault in ENDS_THE_RUN:
        makers += [_make_waiting, _make_waiting]
    names = rng.choice(makers)(rng, nprocs)
    rng.shuffle(names)
    return History(seed, rng.uniform(0.3, 1.0), tuple(_make_plan(rng, name) for name in names), injection)


def make_interrupted_start(seed: int, fault: Fault, longest: float) -> History:
    """Return a history with a fault at any time after the start of the interpreter. Its ranks wait, one with helper processes."""
    rng = random.Random(seed)
    injection = Injection(fault, at=rng.uniform(0.0, longest), gap=0.0, from_interpreter=True)
    plans = (RankPlan("waits"), RankPlan("starts_helpers and waits", at_once=True), RankPlan("waits"))
    return History(seed, 0.5, plans, injection)


def make_interrupted_restarts(seed: int, fault: Fault, longest: float) -> History:
    """Return a history with a fault at any time during restarts. One or two of its ranks always fail soon."""
    rng = random.Random(seed)
    injection = Injection(fault, at=rng.uniform(0.2, longest), gap=0.0)
    failing = [RankPlan(rng.choice(("raises", "is_killed", "exits")), True, number=3) for _ in range(rng.choice((1, 1, 2)))]
    plans = (RankPlan("starts_helpers and waits", at_once=True), *failing, RankPlan("waits"))
    return History(seed, 0.5, plans, injection, rng.choice(("group", "worker")), rng.choice((0.0, 0.0, 0.05)))


def _make_plan(rng: random.Random, name: str) -> RankPlan:
    at_once = rng.random() < 0.3
    return RankPlan(name, at_once, rng.uniform(0.0, 0.05), rng.randint(1, 255))


def _make_failing(rng: random.Random, nprocs: int) -> list[str]:
    failing = rng.choices(_select_actions(Fate.FAILS), k=min(nprocs, rng.choice((1, 1, 1, 2, 3))))
    return failing + _other_actions(rng, nprocs - len(failing))


def _make_waiting(rng: random.Random, nprocs: int) -> list[str]:
    return ["waits", *_other_actions(rng, nprocs - 1)]


def _other_actions(rng: random.Random, number: int) -> list[str]:
    other = _select_actions(Fate.WAITS) + _select_actions(Fate.RETURNS) + _select_actions(Fate.NEVER_EXITS)
    return [rng.choice(other) if rng.random() < 0.5 else "waits" for _ in range(number)]


def _make_succeeding(rng: random.Random, nprocs: int) -> list[str]:
    hanging = _select_actions(Fate.NEVER_EXITS) if rng.random() < 0.3 else []
    return rng.choices(_select_actions(Fate.RETURNS) + hanging, k=nprocs)


def _select_actions(fate: Fate) -> list[str]:
    return [name for name, action in ACTIONS.items() if action.fate is fate]
