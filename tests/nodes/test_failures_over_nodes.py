"""A rank fails on one node: all nodes stop and report the same reason. With restarts left, all restart together."""

import signal

import pytest

from nodes import tasks
from nodes.harness import AT_ONCE, World


@pytest.fixture
def world(job):
    """The ranks of two nodes, two on each."""
    job.start_several(2, nprocs=2)
    return job.await_world(4)


def hosts_of(job, world):
    """Return the name of the host of each rank."""
    names = {node.name: node.hostname for node in job.nodes}
    return [names[process.node] for process in world]


def assert_all_blame(job, world, rank, **facts):
    """Assert that every node reports this rank as the root cause, with these facts. Return their outcomes."""
    outcomes = job.outcomes()
    for outcome in outcomes:
        assert (outcome.error, outcome.state) == ("RunFailedError", "FAILED")
        cause = outcome.root_cause
        expected = {"rank": rank, "hostname": hosts_of(job, world)[rank], "pid": world[rank].pid, **facts}
        assert {name: cause[name] for name in expected} == expected
        assert not cause["is_secondary"]
        assert f"rank {rank}" in outcome.text.splitlines()[0]
    return outcomes


@pytest.mark.parametrize("rank", range(4))
def test_all_nodes_blame_the_rank_that_raised(job, world, rank):
    at = world[rank].order("raise", "it is mine")
    assert job.await_end(world) - at < AT_ONCE
    for outcome in assert_all_blame(job, world, rank, kind="EXCEPTION", exit_code=1):
        assert "RankError: it is mine" in outcome.root_cause["summary"]
        assert "in raise_error" in outcome.root_cause["traceback"]
        assert "raise RankError(text)" in outcome.root_cause["traceback"]
        assert (outcome.cause["type"], outcome.cause["text"]) == ("RankError", "it is mine")
        assert outcome.failures.keys() == {rank}


def test_only_the_root_cause_of_the_job_is_published_as_one(job, world):
    """Ranks of the other node waited for it, so they are victims."""
    world.order("fail_while_connected")
    first, second = assert_all_blame(job, world, 0, kind="EXCEPTION")
    assert first.blamed.pop(0)
    assert second.blamed
    assert not any([*first.blamed.values(), *second.blamed.values()])


def test_calls_return_as_soon_as_all_nodes_have_reported(job, world):
    at = world[3].order("raise", "it is mine")
    assert max(outcome.ended for outcome in job.outcomes()) - at < 2 * AT_ONCE


def test_a_connection_to_a_rank_that_was_killed_on_another_node_is_not_the_cause(job):
    for outcome in [node.outcome() for node in job.start_several(2, tasks.lose_connection)]:
        assert (outcome.root_cause["rank"], outcome.root_cause["signal"]) == (1, signal.SIGKILL)


@pytest.mark.parametrize("rank", [0, 3])
def test_all_nodes_blame_the_rank_that_was_killed(job, world, rank):
    at = world[rank].order("be_killed")
    assert job.await_end(world) - at < AT_ONCE
    assert_all_blame(job, world, rank, kind="SIGNAL", signal=signal.SIGKILL, exit_code=137)


def test_all_nodes_blame_the_rank_that_ended_with_a_status(job, world):
    world[2].order("exit", 3)
    assert_all_blame(job, world, 2, kind="EXIT", exit_code=3)


def test_all_nodes_report_the_same_if_both_fail_at_once(job, world):
    for process in world:
        process.order("raise", f"rank {process.rank}")
    first, second = job.outcomes()
    assert first.root_cause["rank"] == second.root_cause["rank"]
    assert first.root_cause["summary"] == second.root_cause["summary"]
    assert {rank: failure["summary"] for rank, failure in first.failures.items()} == {
        rank: failure["summary"] for rank, failure in second.failures.items()
    }
    assert first.root_cause["rank"] in first.failures


def test_the_job_fails_if_a_rank_raises_after_the_others_have_returned(job, world):
    World(process for process in world if process.rank != 1).order("return", "fine")
    world[1].order("raise", "last")
    assert_all_blame(job, world, 1, kind="EXCEPTION")


def test_each_node_keeps_the_values_of_its_own_ranks(job, world):
    others = World(world[2:])
    others.order("return", "fine")
    job.await_end(others)
    world[1].order("raise", "last")
    first, second = assert_all_blame(job, world, 1, kind="EXCEPTION")
    assert (first.values, second.values) == ({}, {2: "fine", 3: "fine"})
    assert (first.size, second.size) == (4, 4)
    assert first.missing.startswith("rank 0 has no value: stopped by the watcher")
    assert second.missing.startswith("rank 0 has no value: it belongs to another node")


def test_all_nodes_restart_together(job):
    job.start_several(2, nprocs=2, max_restarts=1)
    first = job.await_world(4)
    assert [process.worker["restart_count"] for process in first] == [0] * 4
    first[3].order("raise", "once")
    job.await_end(first)
    second = job.await_world(4)
    assert [process.worker["restart_count"] for process in second] == [1] * 4
    assert second[0].round != first[0].round
    second.order("return", "well")
    for outcome in job.outcomes():
        assert outcome.state == "SUCCEEDED"
        assert outcome.restarts == 1
        assert set(outcome.values.values()) == {"well"}


@pytest.mark.parametrize("failing_rank", [0, 3])
def test_the_budget_is_that_of_the_job(job, failing_rank):
    """The nodes share one restart budget, even if ranks of different nodes fail."""
    job.start_several(2, nprocs=2, max_restarts=1)
    job.await_world(4)[3].order("raise", "once")
    second = job.await_world(4)
    second[failing_rank].order("raise", "once more")
    for outcome in assert_all_blame(job, second, failing_rank):
        assert "once more" in outcome.root_cause["summary"]
        assert outcome.notes == ["not restarted again: all restarts are used up (max_restarts=1)"]


def test_every_node_reports_the_failed_attempts(job):
    job.start_several(2, max_restarts=2)
    for rank in (0, 1):
        job.await_world(2)[rank].order("raise", f"rank {rank}")
    job.await_world(2).order("return")
    for outcome in job.outcomes():
        assert [attempt["state"] for attempt in outcome.attempts] == ["FAILED", "FAILED", "SUCCEEDED"]
        assert [attempt["number"] for attempt in outcome.attempts] == [0, 1, 2]


@pytest.mark.parametrize(("order", "status"), [(("exit", 7), 7), (("raise", "x"), 1), (("be_killed",), 137)])
def test_main_exits_with_the_status_of_the_root_cause_on_every_node(job, order, status):
    job.start_several(2, through="main")
    job.await_world(2)[1].order(*order)
    assert [(outcome.error, outcome.text) for outcome in job.outcomes()] == [("SystemExit", str(status))] * 2
