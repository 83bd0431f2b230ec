"""Jobs of several nodes from one call: `mpwatch.cluster`, with nodes that are threads of this process."""

import os
import signal
from concurrent.futures import Future
from multiprocessing.connection import Client

import numpy as np
import pytest
import torch

import mpwatch
from mpwatch import cluster
from support import functions


@pytest.fixture(scope="module", autouse=True)
def _warm_up():
    """Create a store first: libuv, which torch's store uses, keeps a pipe from its first use on."""
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class RankError(Exception):
    """Raised by a rank."""


def add_up(factor):
    worker = mpwatch.current_worker()
    total = torch.tensor(float(worker.rank))
    torch.distributed.all_reduce(total)
    return factor * float(total), np.full(100_000, worker.rank)


def print_and_fail():
    worker = mpwatch.current_worker()
    print(f"rank {worker.rank}", flush=True)
    if worker.rank == 1:
        raise RankError("the disk is full")
    signal.pause()


def wait_for_stop():
    step = 0
    while not mpwatch.should_stop(step):
        step += 1
    return step


def test_the_result_has_the_values_of_all_ranks():
    events = []
    result = cluster.run(
        cluster.ThreadEngine(), add_up, 2, nodes=2, args=(10,), backend="gloo", on_event=events.append, grace_period=60
    )
    assert [value for value, _ in result] == [60.0] * 4
    assert [int(array[0]) for _, array in result] == [0, 1, 2, 3]
    assert [worker.rank for worker in result.workers] == [0, 1, 2, 3]
    assert {rank for event in events for rank in event.ranks} == {0, 1, 2, 3}
    assert len(result.events) == len(events)


def test_a_failure_is_that_of_the_rank_and_its_output_is_shown(capsys):
    with pytest.raises(
        mpwatch.RunFailedError, match=r"rank 1 on node .* failed first: RankError: the disk is full"
    ) as caught:
        cluster.run(cluster.ThreadEngine(), print_and_fail, 1, nodes=2)
    assert type(caught.value.__cause__) is RankError
    assert caught.value.__cause__.__traceback__.tb_frame.f_code.co_name == "print_and_fail"
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.partition("] ")[2] for line in lines if "rank 1" in line) == ["rank 1"]
    assert all(line.startswith(("[0:", "[1:")) for line in lines)


def test_ctrl_c_stops_all_nodes():
    def interrupt(event):
        if isinstance(event, mpwatch.events.CallStarted):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        cluster.run(cluster.ThreadEngine(), signal.pause, 1, nodes=2, on_event=interrupt)


def test_all_nodes_stop_at_the_same_step():
    result = cluster.run(cluster.ThreadEngine(), wait_for_stop, 1, nodes=2, stop_after=2.0)
    assert list(result) == [result.stopped_at] * 2


class LosingEngine(cluster.ThreadEngine):
    """Loses the first node before it has connected."""

    def start(self, call, number):
        if number == 0:
            lost = Future()
            lost.set_exception(ConnectionError("the machine is gone"))
            return lost
        return super().start(call, number)


def test_a_lost_node_is_replaced():
    result = cluster.run(LosingEngine(), functions.rank, 1, nodes=2)
    assert list(result) == [0, 1]


class BlindEngine(cluster.ThreadEngine):
    """Does not notice that the first node dies after it has connected."""

    def start(self, call, number):
        if number > 0:
            return super().start(call, number)
        (spec,) = call.args
        with Client(spec.driver, authkey=spec.key) as connection:
            connection.send(("hello", 0))
        self._futures[0] = Future()
        return self._futures[0]


def test_a_node_whose_link_breaks_is_replaced():
    result = cluster.run(BlindEngine(), functions.rank, 1, nodes=2)
    assert list(result) == [0, 1]


class BrokenEngine(cluster.ThreadEngine):
    """Can start no node."""

    def start(self, call, number):
        lost = Future()
        lost.set_exception(ConnectionError("there is no such package"))
        return lost


def test_an_engine_that_can_start_no_node_is_an_error():
    with pytest.raises(mpwatch.LaunchError, match="the engine could not start node 2: there is no such package"):
        cluster.run(BrokenEngine(), functions.rank, 1, nodes=1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"post_mortem": True}, TypeError, "a job on a cluster has no option 'post_mortem': the nodes have no terminal"),
        ({"grace_period": -1}, ValueError, "grace_period must be a number of seconds"),
        ({"nodes": 0}, ValueError, "nnodes"),
        ({"epochs": 3}, TypeError, "epochs"),
    ],
)
def test_a_bad_option_is_named(options, error, text):
    with pytest.raises(error, match=text):
        cluster.run(cluster.ThreadEngine(), functions.rank, 1, **{"nodes": 1, **options})
