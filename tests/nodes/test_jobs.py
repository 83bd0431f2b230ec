"""Nodes that form one job: the numbers of their ranks, their results, and options in which nodes differ."""

import pytest

import mpwatch
from nodes import tasks
from nodes.harness import NODE_TIMEOUT

JOIN_TIMEOUT = 3.0  # seconds, where no other node joins
SECRET = {"secret": "of the job"}


def values_of(outcomes):
    """Return the values of all ranks in order. Each outcome must have only those of its own node's ranks."""
    for outcome in outcomes:
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")
    values = {rank: value for outcome in outcomes for rank, value in outcome.values.items()}
    assert len(values) == sum(len(outcome.values) for outcome in outcomes)
    return [values[rank] for rank in range(len(values))]


def collect(values, name):
    return [value[name] for value in values]


def test_two_nodes_are_one_job(job):
    job.start_several(2, tasks.get_worker_info, 2)
    outcomes = job.outcomes()
    values = values_of(outcomes)
    assert collect(values, "rank") == [0, 1, 2, 3]
    assert collect(values, "local_rank") == [0, 1, 0, 1]
    assert collect(values, "group_rank") == [0, 0, 1, 1]
    assert {(value["world_size"], value["local_world_size"], value["group_world_size"]) for value in values} == {(4, 2, 2)}
    assert collect(values, "node")[0::2] == collect(values, "node")[1::2]
    assert {outcome.restarts for outcome in outcomes} == {0}


def test_each_result_has_the_workers_of_its_own_node(job):
    job.start_several(2, tasks.get_worker_info, 2)
    for outcome in job.outcomes():
        workers = {worker["rank"]: worker for worker in outcome.workers}
        assert workers.keys() == outcome.values.keys() == outcome.worker_states.keys()
        for rank, value in outcome.values.items():
            assert value | workers[rank] == value


def test_nodes_may_differ_in_their_ranks(job):
    job.start(tasks.get_worker_info, 1)
    job.start(tasks.get_worker_info, 3)
    first, second = job.outcomes()
    values = values_of([first, second])
    assert {value["world_size"] for value in values} == {4}
    assert {value["local_world_size"] for value in first.values.values()} == {1}
    assert [value["local_rank"] for value in second.values.values()] == [0, 1, 2]
    assert sorted(value["rank"] for value in second.values.values()) == list(second.values)


def test_values_for_the_ranks_of_the_job_or_of_a_node(job):
    job.start(tasks.get_argument, 1, per_rank=["a"])
    job.start(tasks.get_argument, 2, per_rank=["b", "c", "d"])
    first, second = job.outcomes()
    values_of([first, second])
    assert list(first.values.values()) == ["a"]
    assert list(second.values.values()) == [{0: "b", 1: "c", 2: "d"}[rank] for rank in second.values]


def test_values_for_another_number_of_ranks(job):
    nodes = job.start_several(2, tasks.get_argument, 2, per_rank=["a", "b", "c"])
    for node in nodes:
        assert "a PerRank is 3, but the number of ranks is 4 in the job, and 2 on this node" in node.outcome().text


def test_nodes_may_differ_in_their_roles(job):
    job.rendezvous["nnodes"] = 3
    job.start(tasks.get_worker_info, 1, rendezvous={"role": "trainer"})
    job.start(tasks.get_worker_info, 2, rendezvous={"role": "reader"})
    job.start(tasks.get_worker_info, 2, rendezvous={"role": "trainer"})
    trainer, reader, other = job.outcomes()
    values = values_of([trainer, reader, other])
    assert [value["role_rank"] for value in values if value["role"] == "trainer"] == [0, 1, 2]
    assert [value["role_rank"] for value in values if value["role"] == "reader"] == [0, 1]
    assert {(value["role"], value["role_world_size"]) for value in values} == {("trainer", 3), ("reader", 2)}
    assert set(collect(reader.values.values(), "role")) == {"reader"}


def test_the_environment_of_each_rank_has_its_numbers(job):
    job.start_several(2, tasks.get_worker_info, 2, rendezvous={"role": "trainer"}, max_restarts=1)
    for value in values_of(job.outcomes()):
        assert value["environment"] == {
            "RANK": str(value["rank"]),
            "LOCAL_RANK": str(value["local_rank"]),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(value["group_rank"]),
            "NODE_RANK": str(value["group_rank"]),
            "GROUP_WORLD_SIZE": "2",
            "ROLE_NAME": "trainer",
            "ROLE_RANK": str(value["role_rank"]),
            "ROLE_WORLD_SIZE": "4",
            "MASTER_ADDR": value["master_addr"],
            "MASTER_PORT": str(value["master_port"]),
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }


def test_each_node_binds_its_own_ranks(job):
    """Both nodes are on this machine, so each of them splits all CPUs."""
    allowed = tasks.get_cpus()
    ranks = min(2, len(allowed))
    job.start_several(2, tasks.get_cpus, ranks, placement="cores")
    for outcome in job.outcomes():
        assert sorted(cpu for cpus in outcome.values.values() for cpu in cpus) == allowed
        assert len(outcome.values) == ranks


def test_a_node_with_too_few_cpus_ends_the_job(job):
    too_many = len(tasks.get_cpus()) + 1
    healthy, failing = job.start(tasks.follow_order), job.start(tasks.follow_order, too_many, placement="cores")
    assert f"Placement: cpus='cores' needs a CPU for each of the {too_many} ranks" in failing.outcome().text
    assert "Placement: cpus='cores' needs a CPU" in healthy.outcome().text


def test_rank_0_can_be_reached_at_the_master_address(job):
    job.start_several(2, tasks.connect_to_rank_0, 2)
    values = values_of(job.outcomes())
    assert all(value == values[0] for value in values)
    assert values[0][0] in ("127.0.0.1", "127.0.0.2")


def test_the_address_of_rank_0_is_that_of_its_node(job):
    nodes = job.start_several(2, tasks.get_worker_info)
    values = values_of(job.outcomes())
    number = [node.name for node in nodes].index(values[0]["node"])
    assert set(collect(values, "master_addr")) == {f"127.0.0.{1 + number}"}


def test_nodes_with_the_same_secret_form_a_job(job):
    job.rendezvous |= SECRET
    job.start_several(2, tasks.get_worker_info, 2)
    assert [list(outcome.values) for outcome in job.outcomes()] == [[0, 1], [2, 3]]


def test_nodes_with_different_secrets_form_no_job(job):
    job.start(tasks.get_worker_info, rendezvous={**SECRET, "join_timeout": JOIN_TIMEOUT})
    job.start(tasks.get_worker_info, rendezvous={"secret": "of somebody else", "join_timeout": JOIN_TIMEOUT})
    assert [outcome.error for outcome in job.outcomes()] == ["LaunchError"] * 2


def test_the_first_node_serves_the_store(job):
    job.start_several(2, tasks.get_worker_info, rendezvous={"is_host": None})
    assert collect(values_of(job.outcomes()), "rank") == [0, 1]


def test_the_store_may_be_elsewhere(job):
    store = job.start_store()
    nodes = job.start_several(2, tasks.get_worker_info)
    assert collect(values_of(job.outcomes(nodes)), "rank") == [0, 1]
    store.kill()
    store.exit_status()


def test_a_job_of_one_node(job):
    job.rendezvous["nnodes"] = 1
    job.start(tasks.get_worker_info, 2)
    assert collect(values_of(job.outcomes()), "group_world_size") == [1, 1]


def test_four_nodes_are_one_job(job):
    job.rendezvous["nnodes"] = 4
    job.start_several(4, tasks.get_worker_info)
    values = values_of(job.outcomes())
    assert collect(values, "rank") == collect(values, "group_rank") == [0, 1, 2, 3]


@pytest.mark.parametrize("first_is_rank_0", [True, False])
def test_the_node_that_returns_first_waits_for_the_others(job, first_is_rank_0):
    job.start_several(2)
    world = job.await_world(2)
    first, second = (world[0], world[1]) if first_is_rank_0 else (world[1], world[0])
    first.order("return", "early")
    job.wait_until(lambda: first.ended_at is not None, "the end of the first")
    assert all(node.ended_at is None for node in job.nodes)
    second.order("return", "late")
    values = values_of(job.outcomes())
    assert (values[first.rank], values[second.rank]) == ("early", "late")


def test_the_job_ends_on_all_nodes_at_once_when_the_last_rank_returns(job):
    job.start_several(3, rendezvous={"nnodes": 3})
    last = job.await_world(3).order("return")
    assert max(outcome.ended for outcome in job.outcomes()) - last < NODE_TIMEOUT


def assert_all_refuse(job, *words):
    for outcome in job.outcomes():
        assert outcome.error == "LaunchError"
        assert outcome.ended - outcome.started < 2 * JOIN_TIMEOUT
        for word in words:
            assert word in outcome.text


def test_nodes_that_call_different_functions_are_refused(job):
    job.rendezvous["join_timeout"] = JOIN_TIMEOUT
    job.start(tasks.follow_order)
    job.start(tasks.another_function)
    assert_all_refuse(job, "follow_order", "another", job.hostname(1))


def test_nodes_that_expect_different_numbers_of_nodes_are_refused(job):
    job.rendezvous["join_timeout"] = JOIN_TIMEOUT
    job.start(rendezvous={"nnodes": (2, 3)})
    job.start(rendezvous={"nnodes": 2})
    assert_all_refuse(job, "nnodes", job.hostname(1))


def test_nodes_that_differ_in_their_restarts_are_refused(job):
    job.rendezvous["join_timeout"] = JOIN_TIMEOUT
    job.start(max_restarts=1)
    job.start(max_restarts=2)
    assert_all_refuse(job, "restart", job.hostname(1))


def test_a_node_whose_time_runs_out_before_it_joins_names_the_number_of_nodes(job):
    """It spends most of its time waiting for the JobConfig of a job that no node has started."""
    store = job.start_store()
    outcome = job.start(rendezvous={"join_timeout": 0.5}).outcome()
    store.kill()
    store.exit_status()
    assert "0 of 2 nodes had joined" in outcome.text


@pytest.mark.parametrize("missing", [1, 2])
def test_too_few_nodes_are_reported_in_time(job, missing):
    job.rendezvous |= {"nnodes": 1 + missing, "join_timeout": JOIN_TIMEOUT}
    job.start()
    assert_all_refuse(job, f"127.0.0.1:{job.port}", str(1 + missing))


def test_a_store_that_no_node_serves_is_named(job):
    job.rendezvous |= {"join_timeout": JOIN_TIMEOUT, "is_host": False}
    job.start_several(2)
    assert_all_refuse(job, f"127.0.0.1:{job.port}")


def test_an_unknown_host_name_is_named(job):
    job.rendezvous |= {"join_timeout": JOIN_TIMEOUT, "endpoint": "no-such-host.invalid:29400", "is_host": None}
    job.start()
    assert_all_refuse(job, "no-such-host.invalid")


def test_a_port_that_is_taken_is_named(job):
    job.rendezvous["join_timeout"] = JOIN_TIMEOUT
    first = job.start(rendezvous={"nnodes": 1})
    (process,) = job.await_world(1)
    second = job.start(rendezvous={"is_host": True})
    outcome = second.outcome()
    assert outcome.error == "LaunchError"
    assert str(job.port) in outcome.text
    process.order("return")
    assert first.outcome().state == "SUCCEEDED"


def test_jobs_of_other_names_at_the_same_store_are_other_jobs(job):
    store = job.start_store()
    job.rendezvous["nnodes"] = 1
    nodes = [job.start(tasks.get_worker_info, rendezvous={"run_id": name}) for name in ("one", "two")]
    assert [outcome.values[0]["run_id"] for outcome in job.outcomes(nodes)] == ["one", "two"]
    store.kill()
    store.exit_status()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rendezvous": "node0:29400"}, TypeError, "rendezvous must be a Rendezvous, such as"),
        (
            {"max_restarts": mpwatch.RestartPolicy(1, scope="worker")},
            ValueError,
            "on several nodes all ranks are restarted together",
        ),
    ],
)
def test_what_a_run_of_several_nodes_cannot_have(options, error, text):
    with pytest.raises(error, match=text):
        mpwatch.run(int, 1, **{"rendezvous": mpwatch.Rendezvous("node0:29400", "job", 2), **options})
