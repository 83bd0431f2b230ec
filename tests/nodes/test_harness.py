"""Tests of the harness: it must see what it is there to see. Each node here is a job of its own."""

import os
import signal
import socket
import time
from contextlib import suppress
from multiprocessing.connection import wait

import pytest

from nodes import tasks
from nodes.harness import AT_ONCE
from support.process_state import is_alive

ALONE = {"rendezvous": False}


def test_nodes_report_the_outcomes_of_their_calls(job):
    job.start(tasks.get_worker_info, 2, **ALONE)
    job.start(tasks.follow_order, 1, **ALONE)
    job.await_world(1).order("raise", "no more")
    first, second = job.outcomes()
    assert [value["rank"] for value in first.values.values()] == [0, 1]
    assert first.state == "SUCCEEDED"
    assert (second.error, second.root_cause["kind"], second.cause["text"]) == ("RunFailedError", "EXCEPTION", "no more")
    assert "raise_error" in second.root_cause["traceback"]


def test_each_node_has_the_name_of_its_host(job):
    job.start_several(2, tasks.get_worker_info, **ALONE)
    names = [outcome.hostname for outcome in job.outcomes()]
    assert names == [job.hostname(0), job.hostname(1)]


def test_a_watcher_can_be_killed_and_its_ranks_are_seen_to_end(job):
    node = job.start(nprocs=2, **ALONE)
    world = job.await_world(2)
    killed_at = node.kill()
    assert job.await_end(world) - killed_at < 1.0
    assert node.exit_status() == -signal.SIGKILL


def test_ctrl_c_reaches_a_node_as_any_program(job):
    node = job.start(**ALONE)
    job.await_world(1)
    node.send(signal.SIGINT)
    assert node.outcome().error == "KeyboardInterrupt"


def test_a_node_that_a_test_leaves_is_killed_and_reported(job):
    job.start(**ALONE)
    (process,) = job.await_world(1)
    with open(os.pidfd_open(process.pid)) as end:
        with pytest.raises(AssertionError, match="had not seen end"):
            job.close()
        assert wait([end], AT_ONCE)  # a process that ends loses its environment, by which it is found, a moment before


def test_what_a_node_leaves_in_its_process_is_reported(job):
    node = job.start(tasks.get_worker_info, beforehand=tasks.leave_thread, **ALONE)
    with pytest.raises(AssertionError, match=r"node0 left .*forgotten"):
        node.outcome()


def test_processes_that_ranks_leave_are_killed_and_reported(job):
    job.start(tasks.leave_daemon, **ALONE)
    (outcome,) = job.outcomes()
    with pytest.raises(AssertionError, match="processes that were left"):
        job.close()
    assert not is_alive(outcome.values[0])


def test_a_world_has_the_ranks_of_one_attempt(job):
    job.start(nprocs=2, max_restarts=1, **ALONE)
    first = job.await_world(2)
    first[1].order("exit", 3)
    second = job.await_world(2)
    assert not set(first) & set(second)
    assert first.ended_at < min(process.started_at for process in second)
    assert [process.worker["restart_count"] for process in second] == [1, 1]
    second[0].order("be_killed")
    assert job.nodes[0].outcome().root_cause["signal"] == signal.SIGKILL


def test_a_timeout_lists_the_nodes_and_ranks(job):
    node = job.start(**ALONE)
    job.await_world(1)
    with pytest.raises(AssertionError, match=r"waited 0.1 s for a world of 2\nnode0: pid .*running\nrank 0 of 1 on node0"):
        job.await_world(2, within=0.1)
    node.kill()
    with pytest.raises(AssertionError, match="all nodes have ended"):
        job.await_world(2)


def test_a_store_is_served_until_its_process_is_killed(job):
    store = job.start_store()
    with socket.create_connection(("127.0.0.1", job.port)) as connection:
        store.kill()
        with suppress(ConnectionResetError):  # it had not yet taken the connection
            assert connection.recv(1) == b""
    assert store.exit_status() == -signal.SIGKILL


@pytest.mark.parametrize("minutes", [-5, 5])
def test_a_wrong_clock_is_wrong_for_the_rendezvous_of_torch(job, minutes):
    node = job.start(tasks.get_worker_info, skew_seconds=60 * minutes, **ALONE)
    for clock in node.outcome().clocks:
        assert abs(clock - time.time() - 60 * minutes) < 30
