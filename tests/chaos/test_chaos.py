"""Random faults: in runs, each in a program of its own; in calls of a WorkerGroup; and in ranks that lose their peers.

The suite runs a few histories, `tox run -e chaos` hundreds, and `tox run -e faults` a thousand cascades. MPWATCH_CHAOS_SEED
is the first seed, MPWATCH_CHAOS_HISTORIES the number of histories, MPWATCH_CHAOS_INSTANTS the number for each signal during
the start and during restarts.
"""

import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chaos import group_calls, histories
from chaos.cascades import run_cascades
from chaos.harness import run_history
from chaos.histories import Fault, make_history, make_interrupted_restarts, make_interrupted_start
from chaos.judge import find_errors, find_leftovers, seconds_over_limit
from support.acts import parse_action
from support.thoroughness import choose

SEED = int(os.environ.get("MPWATCH_CHAOS_SEED", "1"))
HISTORIES = int(os.environ.get("MPWATCH_CHAOS_HISTORIES", "10"))
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


def assert_right(all_histories, check, command):
    def run_and_check(history):
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            evidence = run_history(history, Path(folder))
        return check(history, evidence), seconds_over_limit(history, evidence)

    with ThreadPoolExecutor(PARALLEL_PROGRAMS) as pool:
        results = list(pool.map(run_and_check, all_histories))
    longest = max((over for _, over in results if over is not None), default=float("nan"))
    wrong = [(history, errors) for history, (errors, _) in zip(all_histories, results, strict=True) if errors]
    print(f"\n{len(results)} histories: {len(wrong)} with errors, the slowest ended {longest:+.2f} s relative to its limit")
    texts = (
        "\n  ".join([str(history), *errors, f"to repeat it: {command.format(history.seed)}"]) for history, errors in wrong
    )
    assert not wrong, "\n" + "\n".join(texts)


@pytest.mark.timeout(120 + 30 * HISTORIES)
@pytest.mark.usefixtures("_default_signal_handlers")
def test_random_histories_keep_the_promises():
    command = "MPWATCH_CHAOS_SEED={} MPWATCH_CHAOS_HISTORIES=1 pytest tests/chaos -k random_histories"
    assert_right([make_history(seed) for seed in range(SEED, SEED + HISTORIES)], find_errors, command)


@pytest.mark.timeout(120 + 30 * INSTANTS)
@pytest.mark.usefixtures("_default_signal_handlers")
@pytest.mark.parametrize("fault", [Fault.KILL, Fault.INTERRUPT, Fault.TERMINATE], ids=lambda fault: fault.name)
@pytest.mark.parametrize(
    ("make", "longest"), [(make_interrupted_start, LONGEST_START), (make_interrupted_restarts, LONGEST_RESTARTS)]
)
def test_a_signal_at_any_time_of_the_start_or_of_restarts_leaves_nothing(make, longest, fault):
    command = "MPWATCH_CHAOS_SEED={} MPWATCH_CHAOS_INSTANTS=1 pytest tests/chaos -k any_time"
    assert_right([make(seed, fault, longest) for seed in range(SEED, SEED + INSTANTS)], find_leftovers, command)


def test_each_action_is_defined():
    assert all(parse_action(action) for action in histories.ACTIONS)


@pytest.mark.parametrize("seed", range(SEED, SEED + HISTORIES))
def test_random_calls_of_a_group(seed):
    """No hang, nothing left, true outcomes, the order of the queue."""
    errors = group_calls.run_history(group_calls.make_history(seed))
    assert not errors, "\n".join(errors)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("any_error", "tolerated"), [(False, 0), (True, choose(0, 10))], ids=["lost peers", "any error"])
def test_the_cause_of_a_cascade_is_found(any_error, tolerated):
    wrong = run_cascades(choose(6, 1000), any_error=any_error)
    assert len(wrong) <= tolerated, wrong
