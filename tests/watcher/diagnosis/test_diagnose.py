"""Which failure is the root cause: the rules at the head of diagnose.py, on given observations. No process is started."""

import signal

import pytest

from mpwatch import FailureKind, WorkerState
from mpwatch.os_support.signals import NATIVE_DUMP_SIGNAL, PYTHON_DUMP_SIGNAL
from mpwatch.results.collective import Collective, CollectiveState
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.diagnose import DEATH_LAG_SECONDS, diagnose
from mpwatch.watcher.machine.transitions import StopReason
from support.observations import (
    CONNECTION_LOST_ERROR,
    PEER_TIMEOUT_ERROR,
    STOPPED_RANK,
    make_observations,
    rank_that_died,
    rank_that_raised,
    rank_that_returned,
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


def test_the_earliest_primary_failure_is_the_cause():
    result = diagnose(
        make_observations(
            rank_that_raised(ValueError("late"), 9.9), rank_that_raised(ValueError("early"), 9.8), STOPPED_RANK
        )
    )
    assert result.root_cause.rank == 1
    assert set(result.failures) == {0, 1}
    assert result.worker_states[2] is WorkerState.STOPPED


def test_a_secondary_failure_is_not_the_cause_even_if_it_is_earlier():
    result = diagnose(
        make_observations(
            rank_that_raised(CONNECTION_LOST_ERROR, 1.0), rank_that_raised(ValueError("cause"), 9.0), rank_that_died(-9, 9.5)
        )
    )
    assert result.root_cause.rank == 1
    assert result.failures[0].is_secondary
    assert not result.failures[2].is_secondary


def test_an_exception_raised_from_a_lost_connection_is_secondary():
    error = RuntimeError("training failed")
    error.__cause__ = CONNECTION_LOST_ERROR
    result = diagnose(make_observations(rank_that_raised(error, 1.0), rank_that_died(-9)))
    assert result.root_cause.rank == 1


def test_an_exception_after_the_stop_is_no_failure():
    result = diagnose(
        make_observations(
            rank_that_raised(ValueError("cause"), 9.0), rank_that_raised(KeyboardInterrupt(), 10.1), STOPPED_RANK
        )
    )
    assert set(result.failures) == {0}


@pytest.mark.parametrize(("code", "failed"), [(-9, True), (-11, True), (-15, False), (3, False), (0, False)])
def test_a_death_during_the_stop_is_a_failure_only_if_the_watcher_cannot_have_caused_it(code, failed):
    result = diagnose(
        make_observations(rank_that_raised(ValueError("x"), 9.0), rank_that_died(code, 10.2, sent=[signal.SIGTERM]))
    )
    assert (1 in result.failures) == failed
    assert (
        1
        not in diagnose(
            make_observations(rank_that_raised(ValueError("x"), 9.0), rank_that_died(-9, 20.2, sent=[9, 15]))
        ).failures
    )


@pytest.mark.parametrize("signum", [PYTHON_DUMP_SIGNAL, NATIVE_DUMP_SIGNAL])
def test_a_program_that_a_rank_executed_and_that_died_of_a_dump_signal_is_no_failure(signum):
    died, raised = rank_that_died(-signum, 10.01), rank_that_raised(ValueError("x"), 9.9)
    assert set(diagnose(make_observations({**died, "was_asked_for_stacks": True}, raised)).failures) == {1}
    assert set(diagnose(make_observations(died, raised)).failures) == {0, 1}


def test_a_crash_during_the_stop_is_a_failure_but_not_the_cause():
    result = diagnose(
        make_observations(rank_that_raised(CONNECTION_LOST_ERROR, 9.0), rank_that_died(-6, 10.2, sent=[signal.SIGTERM]))
    )
    assert result.root_cause.rank == 0
    assert set(result.failures) == {0, 1}


def test_a_rank_that_was_killed_after_it_had_returned_may_be_the_cause():
    gone = {**rank_that_returned(), "died_at": 5.0, "exit_code": -9}
    result = diagnose(make_observations(gone, rank_that_raised(CONNECTION_LOST_ERROR, 6.0)))
    assert result.root_cause.rank == 0
    assert (
        diagnose(make_observations(gone, rank_that_returned(), stop_reason=StopReason.SUCCEEDED, stopped_at=None)).failures
        == {}
    )


def test_a_user_s_own_timeout_text_is_no_peer_error():
    result = diagnose(
        make_observations(rank_that_raised(RuntimeError("timed out waiting for the data server"), 9.0), STOPPED_RANK)
    )
    assert not result.root_cause.is_secondary


def test_two_ranks_that_died_before_the_stop_are_both_failures():
    result = diagnose(make_observations(rank_that_died(7), rank_that_died(7), STOPPED_RANK))
    assert set(result.failures) == {0, 1}


def test_a_success():
    result = diagnose(
        make_observations(rank_that_returned(1), rank_that_returned(2), stop_reason=StopReason.SUCCEEDED, stopped_at=None)
    )
    assert list(result) == [1, 2]
    assert result.state is WorkerState.SUCCEEDED


@pytest.mark.parametrize(("seconds", "is_named"), [(1.0, False), (60.0, True)])
def test_an_interrupted_run_names_the_rank_for_which_others_have_waited_long(seconds, is_named):
    waiting = Collective(
        name="barrier", sequence=1, group="default", ranks=(0, 1), state=CollectiveState.WAITING, seconds=seconds
    )
    ranks = [{"collectives": RankCollectives(collectives=calls)} for calls in ((waiting,), ())]
    result = diagnose(make_observations(*ranks, stop_reason=StopReason.INTERRUPTED, signum=signal.SIGINT))
    text = "the run was stopped: this process received SIGINT"
    late = "; rank 1 has not joined barrier #1 (default group), in which rank 0 waits; it has called no collective"
    assert result.reason == (text + late if is_named else text)
    assert result.failures == {}
