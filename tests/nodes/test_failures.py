"""A rank fails on one node: all nodes stop and report the same reason. With restarts left, all restart together."""

import signal

import pytest

import mpwatch
from nodes import tasks
from nodes.harness import World


@pytest.fixture
def world(job):
    """The ranks of two nodes, two on each."""
    job.start_several(2, nprocs=2)
    return job.await_world(4)


def assert_all_blame(job, world, rank, **facts):
    """Assert that every node reports this rank as the root cause, with these facts. Return their outcomes."""
    outcomes = job.outcomes()
    expected = {"rank": rank, "hostname": job.node_of(world[rank]).hostname, "pid": world[rank].pid, "is_secondary": False}
    for outcome in outcomes:
        assert type(outcome.error) is mpwatch.RunFailedError
        cause = outcome.result.root_cause
        assert {name: getattr(cause, name) for name in expected | facts} == expected | facts
        assert str(outcome.error).startswith(f"rank {rank} ")
    assert world.ended_at is not None
    return outcomes


def test_all_nodes_blame_the_rank_that_raised(job, world):
    world[3].order("raise", "it is mine")
    for outcome in assert_all_blame(job, world, 3, kind=mpwatch.FailureKind.EXCEPTION, exit_code=1):
        cause = outcome.result.root_cause
        assert "RankError: it is mine" in cause.summary
        assert "raise RankError(text)" in cause.traceback
        assert "in raise_error" in outcome.cause
        assert outcome.cause.endswith("RankError: it is mine\n")
        assert outcome.error.result.failures.keys() == {3}


def test_all_nodes_blame_the_rank_that_died(job, world):
    world[0].order("be_killed")
    assert_all_blame(job, world, 0, signal=signal.SIGKILL, exit_code=137)


def test_ranks_that_lose_their_connection_are_victims_on_every_node(job, world):
    world.order("fail_while_connected")
    outcomes = assert_all_blame(job, world, 0, kind=mpwatch.FailureKind.EXCEPTION)
    events = [event for outcome in outcomes for event in outcome.result.events if event.name == "worker_failed"]
    assert {event.ranks[0] for event in events if event.is_root_cause} == {0}
    assert {event.ranks[0] for event in events} & {2, 3}


def test_a_connection_to_a_rank_that_was_killed_on_another_node_is_not_the_cause(job):
    job.start_several(2, tasks.lose_connection)
    for outcome in job.outcomes():
        cause = outcome.result.root_cause
        assert (cause.rank, cause.signal) == (1, signal.SIGKILL)


def test_each_node_keeps_the_values_of_its_own_ranks_if_the_last_rank_of_the_job_raises(job, world):
    others = World([world[2], world[3]])
    others.order("return", "fine")
    job.await_end(others)
    world[1].order("raise", "last")
    first, second = [outcome.result for outcome in assert_all_blame(job, world, 1)]
    assert (first.return_values, second.return_values) == ({}, {2: "fine", 3: "fine"})
    assert (len(first), len(second)) == (4, 4)
    for result, reason in ((first, "stopped by the watcher"), (second, "it belongs to another node")):
        with pytest.raises(LookupError, match=f"^rank 0 has no value: {reason}"):
            list(result)


def test_all_nodes_restart_together_and_share_one_budget(job):
    """The budget holds even if ranks of different nodes fail."""
    job.start_several(2, nprocs=2, max_restarts=1)
    first = job.await_world(4)
    first[3].order("raise", "once")
    job.await_end(first)
    second = job.await_world(4)
    assert (first.restart_counts, second.restart_counts) == ({0}, {1})
    assert second[0].round != first[0].round
    second[0].order("raise", "once more")
    for outcome in assert_all_blame(job, second, 0):
        result = outcome.result
        assert "once more" in result.root_cause.summary
        assert [(attempt.number, attempt.state.name) for attempt in result.attempts] == [(0, "FAILED"), (1, "FAILED")]
        assert [attempt.root_cause.rank for attempt in result.attempts] == [3, 0]
        assert list(result.notes) == ["not restarted again: all restarts are used up (max_restarts=1)"]


def test_main_exits_with_the_status_of_the_root_cause_on_every_node(job):
    job.start_several(2, through="main")
    job.await_world(2)[1].order("exit", 7)
    for outcome in job.outcomes():
        assert (type(outcome.error), outcome.error.code) == (SystemExit, 7)
