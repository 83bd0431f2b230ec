"""Which failure is the root cause: the rules at the head of diagnose.py, on given observations. No process is started."""

import signal

import pytest

from mpwatch import FailureKind
from mpwatch.watcher.diagnosis.diagnose import DEATH_LAG_SECONDS, diagnose
from support.observations import (
    CONNECTION_LOST_ERROR,
    PEER_TIMEOUT_ERROR,
    STOPPED_RANK,
    make_observations,
    rank_that_died,
    rank_that_raised,
)

STOPPED_AT = 10.0  # the default of make_observations
STOP_SIGNALS = [signal.SIGTERM, signal.SIGCONT]


@pytest.mark.parametrize(
    "own_failure", [rank_that_raised(ValueError("x"), 5.0), rank_that_died(7, 5.0)], ids=["raised", "died"]
)
@pytest.mark.parametrize("error", [CONNECTION_LOST_ERROR, PEER_TIMEOUT_ERROR], ids=["connection lost", "peer timeout"])
@pytest.mark.parametrize("at", [4.0, 6.0])
def test_the_time_of_a_secondary_failure_does_not_matter(own_failure, error, at):
    result = diagnose(make_observations(rank_that_raised(error, at), own_failure, STOPPED_RANK))
    assert result.root_cause.rank == 1
    assert [failure.is_secondary for failure in result.failures.values()] == [True, False]


@pytest.mark.parametrize(("delay", "root_cause"), [(0.0, 1), (0.9, 1), (1.1, 0)])
def test_a_death_that_is_noticed_just_after_the_stop_was_before_it(delay, root_cause):
    """The kernel closes the connections of a process before it reports the death."""
    died = rank_that_died(-signal.SIGSEGV, STOPPED_AT + delay * DEATH_LAG_SECONDS)
    result = diagnose(make_observations(rank_that_raised(CONNECTION_LOST_ERROR, 9.0), died))
    assert set(result.failures) == {0, 1}
    assert result.root_cause.rank == root_cause


def test_the_time_of_an_exception_is_exact():
    late = rank_that_raised(ValueError("late"), STOPPED_AT + DEATH_LAG_SECONDS / 2)
    result = diagnose(make_observations(rank_that_raised(CONNECTION_LOST_ERROR, 9.0), late))
    assert (result.root_cause.rank, set(result.failures)) == (0, {0})


@pytest.mark.parametrize(("sent", "failed"), [([*STOP_SIGNALS, signal.SIGKILL], {0}), (STOP_SIGNALS, {0, 1})])
def test_a_rank_that_the_watcher_killed_has_not_failed(sent, failed):
    killed = rank_that_died(-signal.SIGKILL, STOPPED_AT + 5, sent)
    result = diagnose(make_observations(rank_that_raised(ValueError("x"), 9.0), killed))
    assert set(result.failures) == failed
    assert result.root_cause.rank == 0


@pytest.mark.parametrize(
    ("code", "status"), [(3, 3), (255, 255), (256, 1), (512, 1), (300, 44), (-1, 255), ("cannot go on", 1), ([], 1)]
)
def test_an_exit_that_is_no_success_has_no_status_of_success(code, status):
    """The shell shows the last eight bits of a status."""
    root = diagnose(make_observations(rank_that_raised(SystemExit(code), 9.0))).root_cause
    assert (root.kind, root.exit_code) == (FailureKind.EXIT, status)
