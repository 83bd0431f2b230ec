"""Which failure is the root cause: the rules at the head of diagnose.py, on given observations. No process is started."""

import signal
from dataclasses import replace

import pytest

from mpwatch import FailureKind, WorkerState
from mpwatch.os_support.signals import NATIVE_DUMP_SIGNAL, PYTHON_DUMP_SIGNAL
from mpwatch.results.collective import Collective, CollectiveState
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.results.report import format_report, format_verdict
from mpwatch.watcher.diagnosis.collective_verdict import find_verdict
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


def call(name, sequence, state=CollectiveState.COMPLETED, ranks=(0, 1, 2), seconds=0.0):
    return Collective(name=name, sequence=sequence, group="default", ranks=ranks, state=state, seconds=seconds)


def waiting(name, sequence, **details):
    return call(name, sequence, CollectiveState.WAITING, **details)


def with_calls(what, *calls):
    return {**what, "collectives": RankCollectives(collectives=calls)}


def numbered(*ranks):
    """Return the ranks with their numbers in torch's world."""
    return [{**what, "collectives": replace(what["collectives"], rank_in_world=rank)} for rank, what in enumerate(ranks)]


LOST = with_calls(rank_that_raised(CONNECTION_LOST_ERROR, 9.0), call("barrier", 1), call("barrier", 2))
TIMED_OUT = with_calls(rank_that_raised(PEER_TIMEOUT_ERROR, 9.0), call("barrier", 1), call("barrier", 2))
LATE = with_calls(STOPPED_RANK, call("barrier", 1))


def test_a_late_rank_cannot_break_a_connection():
    """A process that mpwatch does not know may have done so."""
    result = diagnose(make_observations(*numbered(LOST, LATE, LOST)))
    assert all(failure.is_secondary for failure in result.failures.values())
    assert 1 not in result.failures


def test_a_late_rank_is_blamed_if_others_have_timed_out():
    result = diagnose(make_observations(*numbered(TIMED_OUT, LATE, LOST)))
    assert (result.root_cause.rank, result.root_cause.kind) == (1, FailureKind.HANG)


def test_the_verdict_on_a_silent_rank_names_the_collective_that_it_has_not_joined():
    waits = with_calls(STOPPED_RANK, call("barrier", 1), waiting("barrier", 2))
    beats = {0: 4.0, 1: 4.5, 2: 4.0}
    result = diagnose(make_observations(*numbered(waits, LATE, waits), silent_ranks=beats, heartbeat_timeout=5.0))
    silence = "rank 1 was silent for 5.5 s (heartbeat_timeout=5)"
    late = "it has not joined barrier #2 (default group), in which ranks 0, 2 wait; its last collective was barrier #1"
    assert format_verdict(result) == f"{silence}; {late}: still at work"
    assert {rank: failure.is_secondary for rank, failure in result.failures.items()} == {0: True, 1: False, 2: True}


@pytest.mark.parametrize("is_silent", [True, False])
def test_one_line_about_several_ranks_that_have_not_joined_speaks_of_each(is_silent):
    first = with_calls(STOPPED_RANK, waiting("barrier", 2, ranks=(0, 1, 2, 3)))
    ranks = numbered(first, *([with_calls(STOPPED_RANK, call("barrier", 1, ranks=(0, 1, 2, 3)))] * 3))
    beats = {"silent_ranks": dict.fromkeys(range(4 if is_silent else 1), 4.0), "heartbeat_timeout": 5.0}
    lines = format_report(diagnose(make_observations(*ranks, **beats))).splitlines()
    late = "each has not joined barrier #2 (default group), in which rank 0 waits; its last collective was barrier #1"
    silence = "silent for 6.0 s (heartbeat_timeout=5); " if is_silent else ""
    assert lines[1] == f"  ranks 2-3: {silence}{late}: still at work"


def test_a_rank_that_has_returned_is_blamed_and_not_one_that_is_late():
    result = diagnose(make_observations(*numbered(LOST, LATE, with_calls(rank_that_returned(), call("barrier", 1)))))
    assert (result.root_cause.rank, result.root_cause.kind) == (2, FailureKind.MISMATCH)
    assert result.failures.keys() == {0, 2}


def test_a_collective_that_has_failed_is_not_completed():
    result = diagnose(make_observations(*numbered(LOST, LATE, with_calls(rank_that_returned(), call("barrier", 1)))))
    assert result.collectives[0].state is CollectiveState.WAITING
    assert result.failures[0].collective == result.collectives[0]


def test_the_verdict_that_has_ended_the_attempt_stays():
    """The odd rank does not answer at the end."""
    odd, usual, late = (waiting("broadcast", 2), waiting("barrier", 2), call("barrier", 1))
    answers = make_answers(usual, late, odd, usual)
    answers = {rank: replace_ranks(answer, (0, 1, 2, 3)) for rank, answer in answers.items()}
    verdict = find_verdict(answers)
    ranks = [{**STOPPED_RANK, "collectives": None if rank == 2 else answers[rank]} for rank in answers]
    result = diagnose(make_observations(*ranks, collective_verdict=verdict))
    assert result.reason == verdict.sentence
    assert result.root_cause is None
    more = {**STOPPED_RANK, "collectives": answers[2]}
    assert (
        diagnose(make_observations(ranks[0], ranks[1], more, ranks[3], collective_verdict=verdict)).reason
        == verdict.sentence
    )


def make_answers(*calls):
    return {rank: RankCollectives(collectives=(found,), rank_in_world=rank) for rank, found in enumerate(calls)}


def replace_ranks(answer, ranks):
    return replace(answer, collectives=tuple(replace(found, ranks=ranks) for found in answer.collectives))


def test_a_verdict_on_ranks_that_are_restarted_on_their_own():
    """With scope="worker" each rank has an attempt of its own."""
    verdict = find_verdict(make_answers(waiting("barrier", 1), waiting("barrier", 1), waiting("broadcast", 1)))
    assert verdict.blamed == (2,)
    result = diagnose(make_observations(with_calls(STOPPED_RANK, waiting("barrier", 1)), collective_verdict=verdict))
    assert (result.failures, result.reason) == ({}, verdict.sentence)


@pytest.mark.parametrize(("seconds", "is_named"), [(1.0, False), (60.0, True)])
def test_an_interrupted_run_names_the_rank_for_which_others_have_waited_long(seconds, is_named):
    ranks = [with_calls({}, waiting("barrier", 1, ranks=(0, 1), seconds=seconds)), with_calls({})]
    result = diagnose(make_observations(*numbered(*ranks), stop_reason=StopReason.INTERRUPTED, signum=signal.SIGINT))
    text = "the run was stopped: this process received SIGINT"
    late = "; rank 1 has not joined barrier #1 (default group), in which rank 0 waits; it has called no collective"
    assert result.reason == (text + late if is_named else text)
    assert result.failures == {}
