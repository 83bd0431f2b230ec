"""Jobs on the nodes of a Ray cluster, which runs on this machine."""

import signal
import threading
from contextlib import suppress

import pytest

import mpwatch
from support.programs import ENV

ray = pytest.importorskip("ray")
pytest.importorskip("torch")  # for the rendezvous

from ray.cluster_utils import Cluster  # noqa: E402

from engines import cases, functions  # noqa: E402
from engines.cases import wait_until  # noqa: E402
from mpwatch.integrations.ray import run  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(200)]

PYTHONPATH = ENV["PYTHONPATH"]
# Ray notices a lost node after 1.5 seconds instead of 15.
SETTINGS = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def nodes():
    """Start a cluster of two nodes with two CPUs each. Yield it."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": SETTINGS})
    cluster.add_node(num_cpus=2, resources={"disk": 1})
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": PYTHONPATH}})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def free_cpus():
    return ray.available_resources().get("CPU", 0.0)


@pytest.fixture
def cluster(nodes):
    """Check that the cluster is as before after the test: resources, placement groups and objects; and mpwatch's threads."""
    wait_until(lambda: free_cpus() == 4.0)
    objects = ray.available_resources()["object_store_memory"]
    yield nodes
    wait_until(lambda: free_cpus() == 4.0)
    wait_until(lambda: ray.available_resources()["object_store_memory"] >= objects)
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("mpwatch")])
    assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}


class TestCluster(cases.Cases):
    @pytest.fixture
    def run(self, cluster):
        return run

    @pytest.fixture
    def driver(self, cluster):
        return DRIVER, cluster.address

    @pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=lambda signum: signum.name)
    def test_the_ranks_end_with_the_driver(self, driver, signum):
        super().test_the_ranks_end_with_the_driver(driver, signum)


DRIVER = """
import ray
from mpwatch.integrations.ray import run
ray.init(address=sys.argv[1], log_to_driver=False)
run(show_pid, 2, nodes=2)
"""


@pytest.mark.usefixtures("cluster")
def test_resources_and_environment_are_those_of_the_tasks():
    runtime_env = {"env_vars": {"PYTHONPATH": PYTHONPATH, "COLOUR": "green"}}
    result = run(functions.read_environment, 1, nodes=1, args=("COLOUR",), resources={"disk": 1}, runtime_env=runtime_env)
    assert list(result) == ["green"]


@pytest.mark.usefixtures("cluster")
def test_ranks_have_the_number_of_threads_of_mpwatch():
    (expected,) = set(mpwatch.run(functions.read_environment, 2, args=("OMP_NUM_THREADS",)))
    assert list(run(functions.read_environment, 2, nodes=2, args=("OMP_NUM_THREADS",))) == [expected] * 4
    env_vars = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "2"}
    result = run(functions.read_environment, 2, nodes=1, args=("OMP_NUM_THREADS",), runtime_env={"env_vars": env_vars})
    assert list(result) == ["2", "2"]


@pytest.mark.usefixtures("cluster")
def test_ctrl_c_three_times_releases_the_resources(monkeypatch):
    """The third one interrupts the wait for the end of the tasks. The fixture waits until the resources are free."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("mpwatch.integrations.ray.wait", interrupt)
        run(functions.wait, 2, nodes=2, on_event=interrupt)


@pytest.mark.usefixtures("cluster")
def test_a_cluster_that_has_no_room_is_named():
    text = r"the Ray cluster has no room for the nodes of the job \(3, .* has waited for 1 s"
    with pytest.raises(mpwatch.LaunchError, match=text):
        run(functions.report, 2, nodes=3, queue_timeout=1.0)


@pytest.mark.usefixtures("cluster")
def test_a_job_begins_without_nodes_that_the_cluster_has_no_room_for():
    cases.check_begin_without_room(run)


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
