"""Jobs on the workers of a Dask cluster, which runs on this machine."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import mpwatch

pytest.importorskip("distributed")
from distributed import Client, Event, LocalCluster, Scheduler, SpecCluster, Worker

from engines import cases, functions
from engines.cases import wait_until
from mpwatch.integrations.dask import run

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def make_cluster(workers, **options):
    return LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None, **options)


@pytest.fixture(scope="module")
def processes():
    """Start a cluster of two workers that are processes of a nanny. Yield a client."""
    with make_cluster(2) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def client(processes):
    """Check that the cluster is as before after the test."""
    processes.wait_for_workers(2)
    yield processes
    check_nothing_left(processes)


def check_nothing_left(client, *, daemonic=True):
    wait_until(lambda: not client.run_on_scheduler(list_tasks))
    wait_until(lambda: not any(client.run(list_own_tasks).values()))
    assert not any(client.run(list_children).values())
    assert set(client.run(is_daemonic).values()) == {daemonic}
    assert not client.futures


def list_tasks(dask_scheduler):
    return list(dask_scheduler.tasks)


def list_own_tasks(dask_worker):
    return list(dask_worker.state.tasks)


def list_children():
    return [child.name for child in multiprocessing.active_children() if "rank" in child.name]


def is_daemonic():
    return multiprocessing.current_process().daemon


class TestCluster(cases.Cases):
    @pytest.fixture
    def run(self, client):
        return partial(run, client)

    @pytest.fixture
    def driver(self, client):
        yield DRIVER, client.scheduler.address
        wait_until(lambda: not client.run_on_scheduler(list_tasks))

    def test_a_lost_node_is_replaced(self):
        with make_cluster(3) as cluster, Client(cluster) as client:  # Dask does not always start a killed worker again
            super().test_a_lost_node_is_replaced(partial(run, client))


DRIVER = """
from distributed import Client
from mpwatch.integrations.dask import run
run(Client(sys.argv[1]), show_pid, 2, nodes=2)
"""


def test_each_node_is_a_worker(client):
    assert {watcher for _, _, watcher, _ in run(client, functions.report, 1, nodes=2)} == set(client.run(os.getpid).values())


def test_workers_may_be_threads():
    with make_cluster(2, processes=False) as cluster, Client(cluster) as client:
        result = run(client, functions.report, 2, nodes=2)
        assert [rank for rank, *_ in result] == [0, 1, 2, 3]
        check_nothing_left(client, daemonic=False)


def test_ranks_are_not_daemonic_and_can_start_processes(client):
    def start_a_child():
        child = subprocess.run([sys.executable, "-c", "print('started')"], capture_output=True, text=True, check=True)
        return child.stdout.strip(), multiprocessing.current_process().daemon

    assert list(run(client, start_a_child, 1, nodes=2)) == [("started", False)] * 2


def test_nodes_are_on_several_hosts_if_there_are_several():
    options = {number: {"host": host, "nthreads": 1} for number, host in enumerate(["127.0.0.1", "127.0.0.1", "127.0.0.2"])}
    workers = {number: {"cls": Worker, "options": option} for number, option in options.items()}
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard_address": None}}
    with SpecCluster(workers, scheduler) as cluster, Client(cluster) as client:
        assert list(run(client, functions.get_rank, 1, nodes=2)) == [0, 1]
        with pytest.raises(mpwatch.LaunchError, match="has a suitable worker for 2 of 3 nodes"):
            run(client, functions.get_rank, 1, nodes=3, queue_timeout=0.5)
        everywhere = list(client.scheduler_info()["workers"])
        assert list(run(client, functions.get_rank, 1, nodes=3, workers=everywhere)) == [0, 1, 2]


def test_a_node_waits_for_a_busy_worker(client):
    def pass_gate():
        assert Event("gate").wait(60)

    gate = Event("gate", client)
    busy = client.submit(pass_gate, workers=[min(client.nthreads())])
    with ThreadPoolExecutor(1) as driver:
        result = driver.submit(run, client, functions.get_rank, 1, nodes=2)
        wait_until(lambda: [key for keys in client.processing().values() for key in keys if key.startswith("mpwatch-")])
        gate.set()
        assert list(result.result()) == [0, 1]
    gate.clear()
    busy.release()


def test_a_job_begins_without_nodes_that_have_no_worker(client):
    cases.check_begin_without_room(partial(run, client))


def test_a_task_can_be_the_driver(client):
    def run_in_task(address):
        from distributed import secede

        with Client(address) as own_client:
            secede()
            return list(run(own_client, functions.get_rank, 1, nodes=1))

    with Client(client.scheduler.address) as client_of_driver:
        assert client_of_driver.submit(run_in_task, client.scheduler.address).result() == [0]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"nodes": 3},
            mpwatch.LaunchError,
            r"the Dask cluster has a suitable worker for 2 of 3 nodes of the job: .*The job has waited for 0\.5 s \(queue_timeout\)",
        ),
        ({"workers": ["tcp://10.0.0.1:1"]}, mpwatch.LaunchError, "has a suitable worker for 0 of 2"),
        ({"workers": "tcp://10.0.0.1:1"}, TypeError, "workers must be a collection of addresses, not a string"),
        ({"resources": {"GPU": 1}}, mpwatch.LaunchError, r"a worker of its own with {'GPU': 1}, on a host"),
    ],
)
def test_a_bad_option_is_named(client, options, error, text):
    with pytest.raises(error, match=text):
        run(client, functions.report, 2, **{"nodes": 2, "queue_timeout": 0.5, **options})


def test_a_bad_client_is_named(client):
    with pytest.raises(TypeError, match=r"client must be a dask\.distributed\.Client, not str"):
        run("tcp://127.0.0.1:8786", functions.report, 2, nodes=2)
    closed = Client(client.scheduler.address)
    closed.close()
    with pytest.raises(ValueError, match="the Dask client is not connected to a scheduler, it is closed; make a new Client"):
        run(closed, functions.report, 2, nodes=2)
