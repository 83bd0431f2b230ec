"""Any run, whatever befalls it, keeps the promises: histories made from numbers, each played in a program of its own.

A few in the suite, and hundreds by `tox run -e chaos`. MPWATCH_CHAOS_SEED is the first history's number,
MPWATCH_CHAOS_HISTORIES says how many, MPWATCH_CHAOS_INSTANTS how many for each signal that strikes during the start.
"""

import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import acts
import histories
import pytest
from harness import play
from histories import Blow, history_of, restarts_cut_short, start_cut_short
from judge import complaints_about, left_over, over_the_bound

SEED = int(os.environ.get("MPWATCH_CHAOS_SEED", "1"))
HISTORIES = int(os.environ.get("MPWATCH_CHAOS_HISTORIES", "12"))
INSTANTS = int(os.environ.get("MPWATCH_CHAOS_INSTANTS", "2"))
LONGEST_START = 0.9  # seconds in which a program comes to have all its ranks at work, and more
LONGEST_RESTARTS = 1.2  # seconds of restarts, each of which takes a twentieth
AT_A_TIME = 2


@pytest.fixture
def _signals_are_heard():
    """Under nohup, or behind a shell's `&`, some are ignored, and programs inherit that."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def judged(history, judge):
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        seen = play(history, Path(folder))
    return judge(history, seen), over_the_bound(history, seen)


def play_all(told, judge):
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(lambda history: judged(history, judge), told))


def report(told, found, again):
    texts = []
    for history, (complaints, _) in zip(told, found, strict=True):
        if complaints:
            texts.append("\n".join([str(history), *(f"  ! {text}" for text in complaints), f"  again: {again(history)}"]))
    return "\n\n".join(texts)


def summary(found):
    wrong = [complaints for complaints, _ in found if complaints]
    left = [complaints for complaints in wrong if any(text.startswith("left") or "changed" in text for text in complaints)]
    longest = max((over for _, over in found if over is not None), default=float("nan"))
    return (
        f"{len(found)} histories: {len(found) - len(wrong)} without fault, nothing left after {len(found) - len(left)}, "
        f"the longest ended {longest:+.2f} s beside its bound"
    )


@pytest.mark.timeout(120 + 30 * HISTORIES)
@pytest.mark.usefixtures("_signals_are_heard")
def test_any_history_keeps_the_promises():
    told = [history_of(seed) for seed in range(SEED, SEED + HISTORIES)]
    print(f"\nfrom MPWATCH_CHAOS_SEED={SEED} on")
    found = play_all(told, complaints_about)
    print(summary(found))
    command = "MPWATCH_CHAOS_SEED={} MPWATCH_CHAOS_HISTORIES=1 pytest tests/chaos -k any_history"
    wrong = report(told, found, lambda history: command.format(history.seed))
    assert not wrong, "\n" + wrong


@pytest.mark.timeout(120 + 30 * INSTANTS)
@pytest.mark.usefixtures("_signals_are_heard")
@pytest.mark.parametrize("blow", [Blow.KILL, Blow.INTERRUPT, Blow.TERMINATE], ids=lambda blow: blow.name)
def test_a_signal_at_any_instant_of_the_start_leaves_nothing(blow):
    leaves_nothing([start_cut_short(seed, blow, LONGEST_START) for seed in range(SEED, SEED + INSTANTS)], blow)


@pytest.mark.timeout(120 + 30 * INSTANTS)
@pytest.mark.usefixtures("_signals_are_heard")
@pytest.mark.parametrize("blow", [Blow.KILL, Blow.INTERRUPT, Blow.TERMINATE], ids=lambda blow: blow.name)
def test_a_signal_at_any_instant_of_restarts_leaves_nothing(blow):
    leaves_nothing([restarts_cut_short(seed, blow, LONGEST_RESTARTS) for seed in range(SEED, SEED + INSTANTS)], blow)


def leaves_nothing(told, blow):
    found = play_all(told, left_over)
    print(f"\n{blow.name}: {summary(found)}")
    command = "MPWATCH_CHAOS_SEED={} MPWATCH_CHAOS_INSTANTS=1 pytest tests/chaos -k any_instant"
    wrong = report(told, found, lambda history: command.format(history.seed))
    assert not wrong, "\n" + wrong


def test_each_act_can_be_done():
    assert all(callable(getattr(acts, name)) for name in histories.ACTS)
