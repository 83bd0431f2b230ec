"""Histories of runs, each made from a number: how many ranks, what each of them does, what befalls the watcher, and when.

Pure data. What the acts are is in acts.py, and ACTS says of each what mpwatch promises to make of it: this is what a run is
judged by (judge.py), so it follows from the promises and not from what mpwatch happens to do.
"""

import random
import signal
from dataclasses import dataclass
from enum import Enum, auto

__all__ = [
    "ACTS",
    "ENDS_THE_RUN",
    "Act",
    "Blow",
    "Fate",
    "History",
    "Part",
    "Strike",
    "history_of",
    "restarts_cut_short",
    "start_cut_short",
]

DEATH_IS_HEARD_OF_LATER = 0.1  # seconds: what the kernel and the watcher may take longer for than for words


class Fate(Enum):
    """What an act comes to, for the run."""

    FAILS = auto()
    WAITS = auto()  # until it is stopped
    RETURNS = auto()
    LINGERS = auto()  # returns, and then does not end


@dataclass(frozen=True)
class Act:
    """Of one rank. A failure has the kind and the exit code that it must be told with."""

    fate: Fate
    kind: str = ""
    exit_code: int | None = None  # None: the part's own number
    exception: str = ""  # the type's name; empty: it dies without a word

    @property
    def is_mute(self) -> bool:
        return not self.exception


def _raises(exception: str = "ValueError") -> Act:
    return Act(Fate.FAILS, "EXCEPTION", 1, exception)


def _is_killed_by(number: int) -> Act:
    return Act(Fate.FAILS, "SIGNAL", 128 + number)


WAITS, RETURNS, LINGERS = Act(Fate.WAITS), Act(Fate.RETURNS), Act(Fate.LINGERS)
ACTS = {
    "raises": _raises(),
    "raises_picky": _raises("PickyError"),
    "raises_a_deep_chain": _raises("RuntimeError"),
    "raises_keyboard_interrupt": _raises("KeyboardInterrupt"),
    "exits": Act(Fate.FAILS, "EXIT", None, "SystemExit"),
    "leaves_a_thread_and_raises": _raises(),
    "hangs_at_exit_and_raises": _raises(),
    "closes_descriptors_and_raises": _raises(),
    "closes_stderr_and_raises": _raises(),
    "changes_handlers_and_raises": _raises(),
    "blocks_signals_and_raises": _raises(),
    "leaves_its_group_and_raises": _raises(),
    "starts_helpers_and_raises": _raises(),
    "returns_a_lock": _raises("TypeError"),
    "vanishes": Act(Fate.FAILS, "EXIT", None),
    "vanishes_as_if_all_were_well": Act(Fate.FAILS, "LOST", 1),
    "closes_descriptors_and_vanishes": Act(Fate.FAILS, "EXIT", None),
    "becomes_a_program_that_fails": Act(Fate.FAILS, "EXIT", None),
    "is_killed": _is_killed_by(signal.SIGKILL),
    "crashes": _is_killed_by(signal.SIGSEGV),
    "aborts": _is_killed_by(signal.SIGABRT),
    "forks_and_is_killed": _is_killed_by(signal.SIGKILL),
    "is_killed_within_a_message": _is_killed_by(signal.SIGKILL),
    "waits": WAITS,
    "stops_itself": WAITS,
    "is_deaf": WAITS,
    "blocks_signals_and_waits": WAITS,
    "holds_the_gil": WAITS,
    "changes_handlers_and_waits": WAITS,
    "leaves_its_group_and_waits": WAITS,
    "becomes_a_program_that_waits": WAITS,
    "starts_helpers_and_waits": WAITS,
    "forks_and_waits": WAITS,
    "waits_within_a_message": WAITS,
    "exits_well_when_told": WAITS,
    "raises_when_told": WAITS,
    "returns": RETURNS,
    "closes_descriptors_and_returns": RETURNS,
    "changes_handlers_and_returns": RETURNS,
    "starts_helpers_and_returns": RETURNS,
    "exits_well": RETURNS,
    "leaves_a_thread_and_returns": LINGERS,
    "hangs_at_exit_and_returns": LINGERS,
}


class Blow(Enum):
    """What befalls the watcher. The value says which signals it gets; those of the others are the watcher's own affair."""

    INTERRUPT = (signal.SIGINT,)
    INTERRUPT_TWICE = (signal.SIGINT, signal.SIGINT)
    TERMINATE = (signal.SIGTERM,)
    TERMINATE_HANDLED = (signal.SIGTERM, "its program has a handler of its own, which raises SystemExit")
    HANG_UP = (signal.SIGHUP,)
    KILL = (signal.SIGKILL,)
    SUSPEND = (signal.SIGSTOP, signal.SIGCONT)
    ALARM = ("its program has a timer, and a handler that raises",)
    KILL_GUARDIAN = ("its helper process is killed",)
    IN_A_THREAD = ("no blow: the run is not made in the main thread",)

    @property
    def signals(self) -> list[int]:
        return [part for part in self.value if isinstance(part, int)]


ENDS_THE_RUN = frozenset(Blow) - {Blow.SUSPEND, Blow.KILL_GUARDIAN, Blow.IN_A_THREAD}


@dataclass(frozen=True)
class Strike:
    """A blow and its instant, in seconds from the call of `run`, or from the start of the interpreter."""

    blow: Blow
    at: float
    gap: float  # to its second signal, if it has one
    from_interpreter: bool = False


@dataclass(frozen=True)
class Part:
    """What one rank does, and when: as soon as it is called, or so much later than all ranks were at work."""

    act: str
    at_once: bool = False
    delay: float = 0.0
    number: int = 1  # an exit code, for the acts that want one

    @property
    def fate(self) -> Fate:
        return ACTS[self.act].fate

    @property
    def exit_code(self) -> int:
        code = ACTS[self.act].exit_code
        return self.number if code is None else code


@dataclass(frozen=True)
class History:
    """One run; the ranks' parts by rank."""

    seed: int
    grace_period: float
    parts: tuple[Part, ...]
    strike: Strike | None
    restarted: str = ""  # "group", or "worker": that scope, again and again
    pause: float = 0.0  # seconds before each restart

    @property
    def blow(self) -> Blow | None:
        return self.strike.blow if self.strike else None

    def __str__(self) -> str:
        lines = [f"history {self.seed}: {len(self.parts)} ranks, grace_period={self.grace_period:.2f}"]
        if self.restarted:
            lines.append(f"  the {self.restarted} is started again {1000 * self.pause:.0f} ms after each failure")
        for rank, part in enumerate(self.parts):
            when = "at once" if part.at_once else f"{1000 * part.delay:.0f} ms after all were at work"
            lines.append(f"  rank {rank} {part.act} ({part.number}), {when}")
        if self.strike is not None:
            since = "the interpreter's start" if self.strike.from_interpreter else "the call"
            lines.append(
                f"  the watcher: {self.strike.blow.name}, {self.strike.at:.3f} s after {since}, {self.strike.gap:.3f}"
            )
        return "\n".join(lines)


def history_of(seed: int) -> History:
    """The same one for the same number. It comes to an end by itself, or by what befalls the watcher."""
    dice = random.Random(seed)
    nprocs = dice.randint(2, 8)
    strike = None
    if dice.random() < 0.45:
        strike = Strike(dice.choice(list(Blow)), at=dice.uniform(0.0, 0.6), gap=dice.uniform(0.0, 0.4))
    plots = [_fails, _fails, _fails, _succeeds]
    if strike is not None and strike.blow in ENDS_THE_RUN:
        plots += [_waits, _waits]
    names = dice.choice(plots)(dice, nprocs)
    dice.shuffle(names)
    return History(seed, dice.uniform(0.3, 1.0), tuple(_part(dice, name) for name in names), strike)


def start_cut_short(seed: int, blow: Blow, longest: float) -> History:
    """Ranks that wait, one with helpers, and a blow at any instant from the interpreter's start on."""
    dice = random.Random(seed)
    strike = Strike(blow, at=dice.uniform(0.0, longest), gap=0.0, from_interpreter=True)
    parts = (Part("waits"), Part("starts_helpers_and_waits", at_once=True), Part("waits"))
    return History(seed, 0.5, parts, strike)


def restarts_cut_short(seed: int, blow: Blow, longest: float) -> History:
    """Ranks of which one or two always fail soon, so that some are always started again, and a blow at any instant of that."""
    dice = random.Random(seed)
    strike = Strike(blow, at=dice.uniform(0.2, longest), gap=0.0)
    failing = [Part(dice.choice(("raises", "is_killed", "exits")), True, number=3) for _ in range(dice.choice((1, 1, 2)))]
    parts = (Part("starts_helpers_and_waits", at_once=True), *failing, Part("waits"))
    return History(seed, 0.5, parts, strike, dice.choice(("group", "worker")), dice.choice((0.0, 0.0, 0.05)))


def _part(dice: random.Random, name: str) -> Part:
    at_once = dice.random() < 0.3
    return Part(name, at_once, dice.uniform(0.0, 0.05), dice.randint(1, 255))


def _fails(dice: random.Random, nprocs: int) -> list[str]:
    failing = dice.choices(_acts(Fate.FAILS), k=min(nprocs, dice.choice((1, 1, 1, 2, 3))))
    return failing + _bystanders(dice, nprocs - len(failing))


def _waits(dice: random.Random, nprocs: int) -> list[str]:
    return ["waits", *_bystanders(dice, nprocs - 1)]


def _bystanders(dice: random.Random, number: int) -> list[str]:
    odd = _acts(Fate.WAITS) + _acts(Fate.RETURNS) + _acts(Fate.LINGERS)
    return [dice.choice(odd) if dice.random() < 0.5 else "waits" for _ in range(number)]


def _succeeds(dice: random.Random, nprocs: int) -> list[str]:
    lingering = _acts(Fate.LINGERS) if dice.random() < 0.3 else []
    return dice.choices(_acts(Fate.RETURNS) + lingering, k=nprocs)


def _acts(fate: Fate) -> list[str]:
    return [name for name, act in ACTS.items() if act.fate is fate]
