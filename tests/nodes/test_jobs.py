"""Nodes that form one job: the numbers of their ranks, their results, and options in which nodes differ."""

import os

import mpwatch
from nodes import tasks


def values_of(results):
    """Return the values of all ranks in order. Each result must have only those of its own node's ranks."""
    values = {rank: value for result in results for rank, value in result.items()}
    assert len(values) == sum(len(result.return_values) for result in results)
    return [values[rank] for rank in range(len(values))]


def collect(values, name):
    return [value[name] for value in values]


NUMBERS = ("rank", "local_rank", "world_size", "group_rank", "group_world_size", "role_rank", "role_world_size")
ELASTIC = {"RUN_ID": "job", "RESTART_COUNT": "0", "MAX_RESTARTS": "1", "USE_AGENT_STORE": "False"}


def test_nodes_that_may_differ_in_their_ranks_and_roles_are_one_job(job):
    """They find the coordinator, in the first node, by its name or by its address, and have the same secret."""
    job.rendezvous |= {"nnodes": 3, "secret": "of the job"}
    by_name = {"role": "trainer", "endpoint": f"localhost:{job.port}"}
    for nprocs, rendezvous in ((1, by_name), (2, {"role": "reader"}), (2, {"role": "trainer"})):
        job.start(tasks.get_worker_info, nprocs, rendezvous=rendezvous, max_restarts=1)
    results = job.results()
    values = values_of(results)
    assert collect(values, "rank") == [0, 1, 2, 3, 4]
    assert collect(values, "local_rank") == [0, 0, 1, 0, 1]
    assert collect(values, "group_rank") == [0, 1, 1, 2, 2]
    assert [value["role_rank"] for value in values if value["role"] == "trainer"] == [0, 1, 2]
    assert [value["role_rank"] for value in values if value["role"] == "reader"] == [0, 1]
    same = ("world_size", "group_world_size", "local_world_size", "role", "role_world_size", "master_addr")
    groups = {(1, "trainer", 3), (2, "reader", 2), (2, "trainer", 3)}
    assert {tuple(value[name] for name in same) for value in values} == {(5, 3, *group, "127.0.0.1") for group in groups}
    for result in results:
        workers = {worker.rank: worker for worker in result.workers}
        assert workers.keys() == result.return_values.keys() == result.worker_states.keys()
        for rank, value in result.items():
            assert {name: getattr(workers[rank], name) for name in tasks.WORKER_FIELDS}.items() <= value.items()
            expected = {name.upper(): str(value[name]) for name in (*NUMBERS, "master_addr", "master_port")}
            expected |= {f"TORCHELASTIC_{name}": text for name, text in ELASTIC.items()}
            expected |= {"NODE_RANK": str(value["group_rank"])}
            assert expected.items() <= value["environment"].items()


def test_nodes_may_share_a_folder_of_logs(job, tmp_path):
    """They find out which of them runs the coordinator."""
    job.start_several(2, tasks.print_rank, logs=mpwatch.LogSpec(tmp_path), rendezvous={"is_host": None})
    job.results()
    written = {path.parent.name: path.read_text() for path in tmp_path.rglob("stdout.log")}
    assert written == {"0": "rank 0\n", "1": "rank 1\n"}


def test_values_for_the_ranks_of_the_job_or_of_a_node(job):
    job.start(str, 1, args=[mpwatch.PerRank(["a"])])
    job.start(str, 2, args=[mpwatch.PerRank(["b", "c", "d"])])
    first, second = job.results()
    assert list(first.return_values.values()) == ["a"]
    assert dict(second.items()) == {rank: {0: "b", 1: "c", 2: "d"}[rank] for rank in second.return_values}


def test_each_node_binds_its_own_ranks(job):
    """Both nodes are on this machine, so each of them splits all CPUs."""
    allowed = sorted(os.sched_getaffinity(0))
    job.start_several(2, os.sched_getaffinity, min(2, len(allowed)), args=[0], placement="cores")
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
