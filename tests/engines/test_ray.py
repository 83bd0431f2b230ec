"""Jobs on the nodes of a Ray cluster, which runs on this machine."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import mpwatch
from support.process_state import is_alive
from support.programs import ENV

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from mpwatch.integrations.ray import run  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
END_SECONDS = 10.0  # after the death of the driver


@pytest.fixture(scope="module")
def nodes():
    """Start a cluster of two nodes with two CPUs each. Yield it."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": ENV["PYTHONPATH"]}})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


@pytest.fixture
def cluster(nodes):
    """Check that the cluster is as before after the test."""
    wait_until(lambda: ray.available_resources().get("CPU") == 4.0)
    yield nodes
    wait_until(lambda: ray.available_resources().get("CPU") == 4.0)
    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}


class RankError(Exception):
    """Raised by a rank."""


def report_pid():
    worker = mpwatch.current_worker()
    return worker.rank, os.getpid(), np.full(100_000, worker.rank)


def fail_on_rank_3():
    if mpwatch.current_worker().rank == 3:
        raise RankError("the disk is full")
    signal.pause()


@pytest.mark.usefixtures("cluster")
def test_the_values_of_all_ranks_come_back_many_times():
    for _ in range(5):
        result = run(report_pid, 2, nodes=2)
        assert [rank for rank, _, _ in result] == [0, 1, 2, 3]
        assert [int(array[-1]) for _, _, array in result] == [0, 1, 2, 3]
        assert not any(is_alive(pid) for _, pid, _ in result)


@pytest.mark.usefixtures("cluster")
def test_a_failure_is_that_of_the_rank():
    with pytest.raises(mpwatch.RunFailedError, match="rank 3 .*failed first: RankError: the disk is full") as caught:
        run(fail_on_rank_3, 2, nodes=2)
    assert type(caught.value.__cause__) is RankError


@pytest.mark.usefixtures("cluster")
def test_ctrl_c_stops_all_nodes():
    def interrupt(event):
        if isinstance(event, mpwatch.events.CallStarted):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(signal.pause, 2, nodes=2, on_event=interrupt)


@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_has_no_room_is_named():
    with pytest.raises(mpwatch.LaunchError, match="the Ray cluster had no room for 3 nodes"):
        run(report_pid, 2, nodes=3, join_timeout=1.0)


DRIVER = """
import sys, os, signal, ray, mpwatch
from mpwatch.integrations.ray import run

def show_pid():
    os.write(1, f"pid {os.getpid()}\\n".encode())
    signal.pause()

ray.init(address=sys.argv[1], log_to_driver=False)
run(show_pid, 2, nodes=2)
"""


def test_the_ranks_end_with_the_driver(cluster):
    driver = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", DRIVER, cluster.address],
        env={**ENV, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with driver:
        pids = []
        while len(pids) < 4:
            line = driver.stdout.readline()
            assert line
            if "pid " in line:
                pids.append(int(line.rpartition("pid ")[2]))
        assert all(is_alive(pid) for pid in pids)
        driver.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), END_SECONDS)


def test_a_lost_node_is_replaced_by_another_one(cluster):
    extra = cluster.add_node(num_cpus=2)
    wait_until(lambda: ray.available_resources().get("CPU") == 6.0)
    lost = []

    def remove_a_node(event):
        if isinstance(event, mpwatch.events.CallStarted) and event.attempt == 0 and not lost:
            lost.append(extra)
            cluster.remove_node(next(node for node in cluster.worker_nodes if is_in_use(node)))

    result = run(wait_for_second_start, 2, nodes=2, max_restarts=2, node_timeout=3.0, on_event=remove_a_node)
    assert list(result) == [1, 1, 1, 1]


def is_in_use(node):
    """Return whether a job has reserved the CPUs of this node."""
    for info in ray.nodes():
        if info["NodeID"] == node.node_id:
            return True
    return False


def wait_for_second_start():
    if mpwatch.current_worker().restart_count == 0:
        signal.pause()
    return mpwatch.current_worker().restart_count
