"""Runs with random faults keep the promises of mpwatch. Each history is made from a seed and runs in a program of its own.

The suite runs a few histories, and `tox run -e chaos` hundreds. MPWATCH_CHAOS_SEED is the first seed, MPWATCH_CHAOS_HISTORIES
the number of histories, MPWATCH_CHAOS_INSTANTS the number for each signal during the start and during restarts.
"""

import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chaos import acts, histories
from chaos.harness import run_history
from chaos.histories import Fault, make_history, make_interrupted_restarts, make_interrupted_start
from chaos.judge import find_errors, find_leftovers, seconds_over_limit

SEED = int(os.environ.get("MPWATCH_CHAOS_SEED", "1"))
HISTORIES = int(os.environ.get("MPWATCH_CHAOS_HISTORIES", "12"))
INSTANTS = int(os.environ.get("MPWATCH_CHAOS_INSTANTS", "2"))
LONGEST_START = 0.9  # seconds: within this time all ranks of a program run, and more
LONGEST_RESTARTS = 1.2  # seconds of restarts, each of which takes a twentieth of a second
PARALLEL_PROGRAMS = 2


@pytest.fixture
def _default_signal_handlers():
    """Reset signals that are ignored under nohup, or behind `&` in a shell. Programs inherit that."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run_and_check(history, check):
    """Run a history. Return the errors that `check` finds, and how many seconds over its limit the run was."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        evidence = run_history(history, Path(folder))
    return check(history, evidence), seconds_over_limit(history, evidence)


def run_all(all_histories, check):
    with ThreadPoolExecutor(PARALLEL_PROGRAMS) as pool:
        return list(pool.map(lambda history: run_and_check(history, check), all_histories))


def format_errors(all_histories, results, command):
    texts = []
    for history, (errors, _) in zip(all_histories, results, strict=True):
        if errors:
            lines = [str(history), *(f"  ! {error}" for error in errors), f"  to repeat it: {command.format(history.seed)}"]
            texts.append("\n".join(lines))
    return "\n\n".join(texts)


def summarize(results):
    wrong = [errors for errors, _ in results if errors]
    left = [errors for errors in wrong if any(error.startswith("left") or "changed" in error for error in errors)]
    longest = max((over for _, over in results if over is not None), default=float("nan"))
    return (
        f"{len(results)} histories: {len(results) - len(wrong)} without errors, nothing left after {len(results) - len(left)}, "
        f"the slowest one ended {longest:+.2f} s relative to its limit"
    )


@pytest.mark.timeout(120 + 30 * HISTORIES)
@pytest.mark.usefixtures("_default_signal_handlers")
def test_random_histories_keep_the_promises():
    all_histories = [make_history(seed) for seed in range(SEED, SEED + HISTORIES)]
    print(f"\nfrom MPWATCH_CHAOS_SEED={SEED} on")
    results = run_all(all_histories, find_errors)
    print(summarize(results))
    command = "MPWATCH_CHAOS_SEED={} MPWATCH_CHAOS_HISTORIES=1 pytest tests/chaos -k random_histories"
    text = format_errors(all_histories, results, command)
    assert not text, "\n" + text


@pytest.mark.timeout(120 + 30 * INSTANTS)
@pytest.mark.usefixtures("_default_signal_handlers")
@pytest.mark.parametrize("fault", [Fault.KILL, Fault.INTERRUPT, Fault.TERMINATE], ids=lambda fault: fault.name)
def test_a_signal_at_any_time_of_the_start_leaves_nothing(fault):
    assert_nothing_left([make_interrupted_start(seed, fault, LONGEST_START) for seed in range(SEED, SEED + INSTANTS)], fault)


@pytest.mark.timeout(120 + 30 * INSTANTS)
@pytest.mark.usefixtures("_default_signal_handlers")
@pytest.mark.parametrize("fault", [Fault.KILL, Fault.INTERRUPT, Fault.TERMINATE], ids=lambda fault: fault.name)
def test_a_signal_at_any_time_of_restarts_leaves_nothing(fault):
    seeds = range(SEED, SEED + INSTANTS)
    assert_nothing_left([make_interrupted_restarts(seed, fault, LONGEST_RESTARTS) for seed in seeds], fault)


def assert_nothing_left(all_histories, fault):
    results = run_all(all_histories, find_leftovers)
    print(f"\n{fault.name}: {summarize(results)}")
    command = "MPWATCH_CHAOS_SEED={} MPWATCH_CHAOS_INSTANTS=1 pytest tests/chaos -k any_time"
    text = format_errors(all_histories, results, command)
    assert not text, "\n" + text


def test_each_action_is_defined():
    assert all(acts.parse_action(action) for action in histories.ACTIONS)
