"""Jobs on the nodes of a Ray cluster, which runs on this machine."""

import os
import signal
import socket
import threading
from contextlib import suppress

import pytest

import mpwatch
from support.process_state import is_alive
from support.programs import ENV

ray = pytest.importorskip("ray")
pytest.importorskip("torch")  # for the rendezvous

from ray.cluster_utils import Cluster  # noqa: E402

from engines import cases, functions  # noqa: E402
from engines.cases import KillAllWatchers, RankPids, find_parent, wait_until  # noqa: E402
from mpwatch.cluster.links import NodeLinks  # noqa: E402
from mpwatch.integrations.ray import run  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(200)]

PATHS = os.pathsep.join([ENV["PYTHONPATH"], str(cases.EXAMPLES)])
# Ray notices a lost node after 1.5 seconds instead of 15.
SETTINGS = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def nodes():
    """Start a cluster of two nodes with two CPUs each. Yield it."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": SETTINGS})
    cluster.add_node(num_cpus=2, resources={"disk": 1})
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": PATHS}})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def free_cpus():
    return ray.available_resources().get("CPU", 0.0)


@pytest.fixture
def cluster(nodes):
    """Check that the cluster is as before after the test: resources, placement groups and objects."""
    wait_until(lambda: free_cpus() == 4.0)
    objects = ray.available_resources()["object_store_memory"]
    yield nodes
    wait_until(lambda: free_cpus() == 4.0)
    wait_until(lambda: ray.available_resources()["object_store_memory"] >= objects)
    assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}


@pytest.fixture
def further_node(nodes):
    """Add a third node for one test."""
    node = nodes.add_node(num_cpus=2)
    wait_until(lambda: free_cpus() == 6.0)
    yield node
    if node in nodes.worker_nodes:
        nodes.remove_node(node)
    if not nodes.worker_nodes:  # the test has removed the second node
        nodes.add_node(num_cpus=2, resources={"disk": 1})
    wait_until(lambda: free_cpus() == 4.0)


@pytest.mark.usefixtures("cluster")
def test_the_values_of_all_ranks_come_back():
    result = run(functions.report_pid, 2, nodes=2)
    assert [rank for rank, _, _ in result] == [0, 1, 2, 3]
    assert [int(array[-1]) for _, _, array in result] == [0, 1, 2, 3]
    assert not any(is_alive(pid) for _, pid, _ in result)
    assert [worker.group_rank for worker in result.workers] == [0, 0, 1, 1]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("fn", "options"), cases.FAILURES)
def test_a_failure_is_that_on_one_machine(fn, options):
    cases.check_failure(run, fn, options)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_timeout_ends_all_nodes():
    with pytest.raises(mpwatch.RunTimeoutError, match=r"the run did not end within timeout=3 s"):
        run(functions.wait, 2, nodes=2, timeout=3)


@pytest.mark.usefixtures("cluster")
def test_resources_and_environment_are_those_of_the_tasks():
    runtime_env = {"env_vars": {"PYTHONPATH": PATHS, "COLOUR": "green"}}
    result = run(functions.read_environment, 1, nodes=1, args=("COLOUR",), resources={"disk": 1}, runtime_env=runtime_env)
    assert list(result) == ["green"]


@pytest.mark.usefixtures("cluster")
def test_ranks_have_the_number_of_threads_of_mpwatch():
    (expected,) = set(mpwatch.run(functions.read_environment, 2, args=("OMP_NUM_THREADS",)))
    assert list(run(functions.read_environment, 2, nodes=2, args=("OMP_NUM_THREADS",))) == [expected] * 4
    env_vars = {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "2"}
    result = run(functions.read_environment, 2, nodes=1, args=("OMP_NUM_THREADS",), runtime_env={"env_vars": env_vars})
    assert list(result) == ["2", "2"]


@pytest.mark.usefixtures("cluster")
def test_ctrl_c_stops_all_nodes():
    pids = RankPids()

    def interrupt(event):
        pids(event)
        if len(pids.pids) == 4:
            pids.pids[4] = os.getpid()  # once
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        run(functions.wait, 2, nodes=2, on_event=interrupt)
    assert not any(is_alive(pid) for pid in pids.pids.values() if pid != os.getpid())
    assert "SIGINT" in "".join(caught.value.__notes__)


@pytest.mark.usefixtures("cluster")
def test_ctrl_c_three_times_releases_the_resources(monkeypatch):
    """The third one interrupts the wait for the end of the tasks. The fixture waits until the resources are free."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ray, "wait", cases.interrupt)
        run(functions.wait, 2, nodes=2, on_event=cases.interrupt)


@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_has_no_room_is_named():
    with pytest.raises(
        mpwatch.LaunchError, match=r"the Ray cluster has no room for the nodes of the job \(3, .* has waited for 1 s"
    ):
        run(functions.report_pid, 2, nodes=3, queue_timeout=1.0)


@pytest.mark.usefixtures("cluster")
def test_tasks_that_cannot_reach_the_driver_are_an_error(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()  # nothing listens there after this block
    monkeypatch.setattr(NodeLinks, "address", property(lambda self: address, lambda self, value: None), raising=False)
    with pytest.raises(mpwatch.LaunchError, match=r"could not start node 2: .* cannot connect to the driver at .*refused"):
        run(functions.report_pid, 1, nodes=1)


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("nodes_option", [0, (2, 1), "two", (1, 2, 3)])
def test_a_bad_number_of_nodes_is_named(nodes_option):
    with pytest.raises((TypeError, ValueError), match="nodes "):
        run(functions.report_pid, 2, nodes=nodes_option)


@pytest.mark.usefixtures("cluster")
def test_a_view_shows_the_ranks_of_all_nodes(capfd):
    run(functions.report_steps, 2, nodes=2, args=(5,), progress=True)
    assert "4 ranks" in capfd.readouterr().err


DRIVER = [
    "import ray",
    "from mpwatch.integrations.ray import run",
    "ray.init(address=sys.argv[1], log_to_driver=False)",
    "run(show_pid, 2, nodes=2)",
]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=lambda signum: signum.name)
def test_the_ranks_end_with_the_driver(cluster, signum):
    cases.check_death_of_driver(cases.start_driver(DRIVER, cluster.address), signum)


class KillWatcher(RankPids):
    """Kills the watcher of rank 2 when all ranks have started."""

    def __call__(self, event):
        super().__call__(event)
        if len(self.pids) == 4 and event.attempt == 0:
            self.first_pids, self.pids = self.pids, {}
            os.kill(find_parent(self.first_pids[2]), signal.SIGKILL)


@pytest.mark.usefixtures("cluster")
def test_a_killed_watcher_is_a_lost_node():
    pids = KillWatcher()
    result = run(functions.wait_for_second_start, 2, nodes=2, max_restarts=1, node_timeout=3.0, on_event=pids)
    assert list(result) == [(rank, 1) for rank in range(4)]
    assert result.restarts == 1
    wait_until(lambda: not any(is_alive(pid) for pid in pids.first_pids.values()))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_killed_watcher_fails_a_job_that_has_no_restart():
    text = r"node 1 \(.*\) with ranks 2-3 was lost: its program sent no sign of life for 3 s"
    with pytest.raises(mpwatch.RunFailedError, match=text):
        run(functions.wait_for_second_start, 2, nodes=2, node_timeout=3.0, on_event=KillWatcher())


@pytest.mark.usefixtures("cluster")
def test_a_job_whose_nodes_are_all_lost_is_restarted():
    cases.check_loss_of_all_nodes(run)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_job_whose_only_watcher_is_killed_again_and_again_fails():
    kill = KillAllWatchers(ranks=1, attempts=2)
    with pytest.raises(mpwatch.RunFailedError, match=r"node 0 \(.*\) with rank 0 was lost: ") as caught:
        run(functions.wait, 1, nodes=1, max_restarts=1, node_timeout=3.0, on_event=kill)
    assert caught.value.result.failures[0].kind is mpwatch.FailureKind.LOST
    assert "not restarted again: all restarts are used up" in str(caught.value)


@pytest.mark.usefixtures("cluster")
def test_a_job_does_not_wait_for_nodes_that_the_cluster_has_no_room_for(caplog):
    cases.check_begin_without_room(run, caplog)


@pytest.mark.slow
@pytest.mark.usefixtures("further_node")
def test_a_lost_node_is_replaced_by_another_one(nodes):
    pids = RankPids()
    removed = []

    def remove_node(event):
        pids(event)
        if len(pids.pids) == 4 and not removed:
            raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes.worker_nodes}
            used = {find_parent(find_parent(pid)) for pid in pids.pids.values()} & raylets.keys()
            removed.append(raylets[used.pop()])
            nodes.remove_node(removed[0], allow_graceful=False)

    result = run(functions.wait_for_second_start, 2, nodes=2, max_restarts=1, node_timeout=3.0, on_event=remove_node)
    assert list(result) == [(rank, 1) for rank in range(4)]
    assert removed


@pytest.mark.slow
def test_a_lost_node_that_cannot_be_replaced_fails_the_job(nodes):
    pids = RankPids()
    lost = nodes.add_node(num_cpus=3)
    wait_until(lambda: free_cpus() == 7.0)

    def remove_node(event):
        pids(event)
        if len(pids.pids) == 3 and lost in nodes.worker_nodes:
            nodes.remove_node(lost, allow_graceful=False)

    options = {"max_restarts": 1, "join_timeout": 20.0, "node_timeout": 3.0}
    try:
        with pytest.raises(mpwatch.RunFailedError, match="was lost"):
            run(functions.wait_for_second_start, 1, nodes=3, num_cpus=2, on_event=remove_node, **options)
    finally:
        if lost in nodes.worker_nodes:
            nodes.remove_node(lost)
    wait_until(lambda: free_cpus() == 4.0)
    assert not any(is_alive(pid) for pid in pids.pids.values())


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_ctrl_c_ends_the_wait_for_room():
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(functions.wait, 2, nodes=3)
    timer.join()


@pytest.mark.slow
def test_a_new_node_joins_the_job(cluster):
    added = []

    def add_node(event):
        if isinstance(event, mpwatch.events.CallStarted) and not added:
            added.append(cluster.add_node(num_cpus=2, resources={"tape": 1}))

    blocker = ray.remote(functions.wait).options(num_cpus=2).remote()  # on one of the two nodes
    try:
        result = run(functions.wait_for_world_size, 2, nodes=(1, 2), args=(4,), on_event=add_node)
        assert list(result) == [0, 1, 2, 3]
        assert result.restarts == 0
    finally:
        ray.cancel(blocker, force=True)
        with suppress(ray.exceptions.RayError):
            ray.get(blocker)
        if added:
            cluster.remove_node(added[0])


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_200_megabytes_come_back_and_can_be_written_to():
    size = 50 << 20
    result = run(functions.return_bytes, 2, nodes=2, args=(size,))
    for rank, array in enumerate(result):
        assert array.nbytes == size
        assert int(array[-1]) == rank
        array[0] = 7


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_20_runs_in_a_row_leave_the_cluster_as_it_was():
    run(functions.report_pid, 2, nodes=2)
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        assert len(run(functions.report_pid, 2, nodes=2)) == 4
        with pytest.raises(mpwatch.RunFailedError):
            run(functions.raise_in_rank_3, 2, nodes=2)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
    assert len(os.listdir("/proc/self/task")) <= threads + 2


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_digits_are_learned_on_two_nodes():
    cases.check_digits(run)


@pytest.mark.slow
def test_a_job_on_four_nodes(cluster):
    further = [cluster.add_node(num_cpus=2) for _ in range(2)]
    try:
        wait_until(lambda: free_cpus() == 8.0)
        cases.check_four_nodes(run)
    finally:
        for node in further:
            cluster.remove_node(node)
