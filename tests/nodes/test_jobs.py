"""Nodes that form one job: the numbers of their ranks, their results, and options in which nodes differ."""

import os

import pytest

import mpwatch
from nodes import tasks


def values_of(results):
    """Return the values of all ranks in order. Each result must have only those of its own node's ranks."""
    values = {rank: value for result in results for rank, value in result.items()}
    assert len(values) == sum(len(result.return_values) for result in results)
    return [values[rank] for rank in range(len(values))]


def collect(values, name):
    return [value[name] for value in values]


def test_two_nodes_are_one_job(job):
    """The coordinator runs in the first node. Its ranks are numbered first, and each rank knows its numbers."""
    job.start_several(2, tasks.get_worker_info, 2, rendezvous={"role": "trainer", "is_host": None}, max_restarts=1)
    values = values_of(job.results())
    assert collect(values, "rank") == [0, 1, 2, 3]
    assert collect(values, "local_rank") == [0, 1, 0, 1]
    assert collect(values, "group_rank") == [0, 0, 1, 1]
    assert {(value["world_size"], value["local_world_size"], value["group_world_size"]) for value in values} == {(4, 2, 2)}
    assert collect(values, "node")[0::2] == collect(values, "node")[1::2]
    same = ("rank", "local_rank", "world_size", "group_rank", "role_rank", "role_world_size", "master_addr", "master_port")
    elastic = {"RUN_ID": "job", "RESTART_COUNT": "0", "MAX_RESTARTS": "1", "USE_AGENT_STORE": "False"}
    for value in values:
        expected = {name.upper(): str(value[name]) for name in same}
        expected |= {f"TORCHELASTIC_{name}": text for name, text in elastic.items()}
        expected |= {"NODE_RANK": str(value["group_rank"]), "GROUP_WORLD_SIZE": "2"}
        assert expected.items() <= value["environment"].items()


def test_nodes_may_differ_in_their_ranks_and_roles(job):
    """They find the coordinator by its name or by its address, and have the same secret."""
    job.rendezvous |= {"nnodes": 3, "secret": "of the job"}
    job.start(tasks.get_worker_info, 1, rendezvous={"role": "trainer", "endpoint": f"localhost:{job.port}"})
    job.start(tasks.get_worker_info, 2, rendezvous={"role": "reader"})
    job.start(tasks.get_worker_info, 2, rendezvous={"role": "trainer"})
    results = job.results()
    values = values_of(results)
    assert {(value["world_size"], value["group_world_size"]) for value in values} == {(5, 3)}
    assert [len(result.return_values) for result in results] == [1, 2, 2]
    assert [value["role_rank"] for value in values if value["role"] == "trainer"] == [0, 1, 2]
    assert [value["role_rank"] for value in values if value["role"] == "reader"] == [0, 1]
    assert {(value["role"], value["role_world_size"]) for value in values} == {("trainer", 3), ("reader", 2)}
    for result in results:
        workers = {worker.rank: worker for worker in result.workers}
        assert workers.keys() == result.return_values.keys() == result.worker_states.keys()
        for rank, value in result.items():
            assert {name: getattr(workers[rank], name) for name in tasks.WORKER_FIELDS}.items() <= value.items()


def test_nodes_may_share_a_folder_of_logs(job, tmp_path):
    job.start_several(2, tasks.print_rank, logs=mpwatch.LogSpec(tmp_path))
    job.results()
    written = {path.parent.name: path.read_text() for path in tmp_path.rglob("stdout.log")}
    assert written == {"0": "rank 0\n", "1": "rank 1\n"}


def test_rank_0_can_be_reached_at_the_address_of_its_node(job):
    job.rendezvous["nnodes"] = 3
    job.start_several(3, tasks.connect_to_rank_0)
    results = job.results()
    number = next(number for number, result in enumerate(results) if 0 in result.return_values)
    (address,) = set(values_of(results))
    assert address[0] == f"127.0.0.{1 + number}"


def test_values_for_the_ranks_of_the_job_or_of_a_node(job):
    job.start(tasks.get_argument, 1, args=[mpwatch.PerRank(["a"])])
    job.start(tasks.get_argument, 2, args=[mpwatch.PerRank(["b", "c", "d"])])
    first, second = job.results()
    assert list(first.return_values.values()) == ["a"]
    assert dict(second.items()) == {rank: {0: "b", 1: "c", 2: "d"}[rank] for rank in second.return_values}


def test_each_node_binds_its_own_ranks(job):
    """Both nodes are on this machine, so each of them splits all CPUs."""
    allowed = sorted(os.sched_getaffinity(0))
    job.start_several(2, tasks.get_cpus, min(2, len(allowed)), placement="cores")
    for result in job.results():
        assert sorted(cpu for cpus in result.return_values.values() for cpu in cpus) == allowed


def test_nodes_are_sorted_by_their_rank(job):
    job.start(tasks.get_worker_info, rendezvous={"rank": 1})
    job.start(tasks.get_worker_info, rendezvous={"rank": 0})
    first, second = job.results()
    assert ([*first.return_values], [*second.return_values]) == ([1], [0])


def test_all_nodes_end_when_the_last_rank_returns(job):
    job.start_several(2)
    first, last = job.await_world(2)
    first.order("return", "early")
    job.wait_until(lambda: first.ended_at, "the end of the first")
    assert all(node.ended_at is None for node in job.nodes)
    last.order("return", "late")
    assert values_of(job.results()) == ["early", "late"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rendezvous": "node0:29400"}, TypeError, "rendezvous must be a Rendezvous, such as"),
        ({"max_restarts": mpwatch.RestartPolicy(1, scope="worker")}, ValueError, "all ranks are restarted together"),
    ],
)
def test_what_a_run_of_several_nodes_cannot_have(options, error, text):
    with pytest.raises(error, match=text):
        mpwatch.run(int, 1, **{"rendezvous": mpwatch.Rendezvous("node0:29400", "job", 2), **options})
