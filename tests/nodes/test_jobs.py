"""Nodes that form one job: who is who in it, what comes of it, and what nodes do not agree in."""

import pytest

import mpwatch

from . import tasks
from .harness import NODE_TIMEOUT

JOIN_TIMEOUT = 3.0  # seconds, where nobody comes
SECRET = {"secret": "of the job"}


def values_of(outcomes):
    """By rank; each outcome has those of its own node's ranks and of no other."""
    for outcome in outcomes:
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")
    values = {rank: value for outcome in outcomes for rank, value in outcome.values.items()}
    assert len(values) == sum(len(outcome.values) for outcome in outcomes)
    return [values[rank] for rank in range(len(values))]


def told(values, name):
    return [value[name] for value in values]


def test_two_nodes_are_one_job(job):
    job.start_several(2, tasks.who, 2)
    outcomes = job.outcomes()
    values = values_of(outcomes)
    assert told(values, "rank") == [0, 1, 2, 3]
    assert told(values, "local_rank") == [0, 1, 0, 1]
    assert told(values, "group_rank") == [0, 0, 1, 1]
    assert {(value["world_size"], value["local_world_size"], value["group_world_size"]) for value in values} == {(4, 2, 2)}
    assert told(values, "node")[0::2] == told(values, "node")[1::2]
    assert {outcome.restarts for outcome in outcomes} == {0}


def test_each_result_has_the_workers_of_its_own_node(job):
    job.start_several(2, tasks.who, 2)
    for outcome in job.outcomes():
        workers = {worker["rank"]: worker for worker in outcome.workers}
        assert workers.keys() == outcome.values.keys() == outcome.worker_states.keys()
        for rank, value in outcome.values.items():
            assert value | workers[rank] == value


def test_nodes_may_differ_in_their_ranks(job):
    job.start(tasks.who, 1)
    job.start(tasks.who, 3)
    first, second = job.outcomes()
    values = values_of([first, second])
    assert {value["world_size"] for value in values} == {4}
    assert {value["local_world_size"] for value in first.values.values()} == {1}
    assert [value["local_rank"] for value in second.values.values()] == [0, 1, 2]
    assert sorted(value["rank"] for value in second.values.values()) == list(second.values)


def test_nodes_may_differ_in_their_roles(job):
    job.terms["nnodes"] = 3
    job.start(tasks.who, 1, role="trainer")
    job.start(tasks.who, 2, role="reader")
    job.start(tasks.who, 2, role="trainer")
    trainer, reader, other = job.outcomes()
    values = values_of([trainer, reader, other])
    assert [value["role_rank"] for value in values if value["role"] == "trainer"] == [0, 1, 2]
    assert [value["role_rank"] for value in values if value["role"] == "reader"] == [0, 1]
    assert {(value["role"], value["role_world_size"]) for value in values} == {("trainer", 3), ("reader", 2)}
    assert set(told(reader.values.values(), "role")) == {"reader"}


def test_the_environment_of_each_rank_says_who_it_is(job):
    job.start_several(2, tasks.who, 2, role="trainer", max_restarts=1)
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


def test_rank_0_can_be_reached_where_all_ranks_are_told(job):
    job.start_several(2, tasks.serves_as_master, 2)
    values = values_of(job.outcomes())
    assert all(value == values[0] for value in values)
    assert values[0][0] in ("127.0.0.1", "127.0.0.2")


def test_the_address_of_rank_0_is_that_of_its_node(job):
    nodes = job.start_several(2, tasks.who)
    values = values_of(job.outcomes())
    number = [node.name for node in nodes].index(values[0]["node"])
    assert set(told(values, "master_addr")) == {f"127.0.0.{1 + number}"}


def test_nodes_with_the_same_secret_form_a_job(job):
    job.terms |= SECRET
    job.start_several(2, tasks.who, 2)
    assert [list(outcome.values) for outcome in job.outcomes()] == [[0, 1], [2, 3]]


def test_what_is_said_is_not_believed_without_the_secret(job):
    job.start(tasks.who, terms={**SECRET, "join_timeout": JOIN_TIMEOUT})
    job.start(tasks.who, terms={"secret": "of somebody else", "join_timeout": JOIN_TIMEOUT})
    assert [outcome.error for outcome in job.outcomes()] == ["LaunchError"] * 2


def test_whoever_comes_first_serves_the_store(job):
    job.start_several(2, tasks.who, terms={"is_host": None})
    assert told(values_of(job.outcomes()), "rank") == [0, 1]


def test_the_store_may_be_elsewhere(job):
    store = job.start_store()
    nodes = job.start_several(2, tasks.who)
    assert told(values_of(job.outcomes(nodes)), "rank") == [0, 1]
    store.kill()
    store.exit_status()


def test_a_job_of_one_node(job):
    job.terms["nnodes"] = 1
    job.start(tasks.who, 2)
    assert told(values_of(job.outcomes()), "group_world_size") == [1, 1]


def test_four_nodes_are_one_job(job):
    job.terms["nnodes"] = 4
    job.start_several(4, tasks.who)
    values = values_of(job.outcomes())
    assert told(values, "rank") == told(values, "group_rank") == [0, 1, 2, 3]


@pytest.mark.parametrize("first_is_rank_0", [True, False])
def test_who_is_done_first_waits_for_the_others(job, first_is_rank_0):
    job.start_several(2)
    world = job.await_world(2)
    first, second = (world[0], world[1]) if first_is_rank_0 else (world[1], world[0])
    first.order("return", "early")
    job.wait_until(lambda: first.ended_at is not None, "the end of the first")
    assert all(node.ended_at is None for node in job.nodes)
    second.order("return", "late")
    values = values_of(job.outcomes())
    assert (values[first.rank], values[second.rank]) == ("early", "late")


def test_the_job_is_over_for_all_at_once_when_the_last_is_done(job):
    job.start_several(3, terms={"nnodes": 3})
    last = job.await_world(3).order("return")
    assert max(outcome.ended for outcome in job.outcomes()) - last < NODE_TIMEOUT


def assert_all_refuse(job, *words):
    for outcome in job.outcomes():
        assert outcome.error == "LaunchError"
        assert outcome.ended - outcome.began < 2 * JOIN_TIMEOUT
        for word in words:
            assert word in outcome.text


def test_nodes_that_call_different_functions_are_refused(job):
    job.terms["join_timeout"] = JOIN_TIMEOUT
    job.start(tasks.obeys)
    job.start(tasks.another)
    assert_all_refuse(job, "obeys", "another", "host1")


def test_nodes_that_expect_different_numbers_of_nodes_are_refused(job):
    job.terms["join_timeout"] = JOIN_TIMEOUT
    job.start(terms={"nnodes": (2, 3)})
    job.start(terms={"nnodes": 2})
    assert_all_refuse(job, "nnodes", "host1")


def test_nodes_that_differ_in_their_restarts_are_refused(job):
    job.terms["join_timeout"] = JOIN_TIMEOUT
    job.start(max_restarts=1)
    job.start(max_restarts=2)
    assert_all_refuse(job, "restart", "host1")


def test_who_has_come_too_late_to_be_counted_is_not_told_of_a_job_that_runs(job):
    """Most of its time goes by before it has joined: it waits for the terms of a job that nobody has begun."""
    store = job.start_store()
    outcome = job.start(terms={"join_timeout": 0.5}).outcome()
    store.kill()
    store.exit_status()
    assert "0 of 2 nodes had come" in outcome.text


@pytest.mark.parametrize("missing", [1, 2])
def test_where_too_few_come_it_is_said_in_time(job, missing):
    job.terms |= {"nnodes": 1 + missing, "join_timeout": JOIN_TIMEOUT}
    job.start()
    assert_all_refuse(job, f"127.0.0.1:{job.port}", str(1 + missing))


def test_a_store_that_nobody_serves_is_named(job):
    job.terms |= {"join_timeout": JOIN_TIMEOUT, "is_host": False}
    job.start_several(2)
    assert_all_refuse(job, f"127.0.0.1:{job.port}")


def test_a_name_that_nobody_knows_is_named(job):
    job.terms |= {"join_timeout": JOIN_TIMEOUT, "endpoint": "no-such-host.invalid:29400", "is_host": None}
    job.start()
    assert_all_refuse(job, "no-such-host.invalid")


def test_a_port_that_is_taken_is_named(job):
    job.terms["join_timeout"] = JOIN_TIMEOUT
    first = job.start(terms={"nnodes": 1})
    (life,) = job.await_world(1)
    second = job.start(terms={"is_host": True})
    outcome = second.outcome()
    assert outcome.error == "LaunchError"
    assert str(job.port) in outcome.text
    life.order("return")
    assert first.outcome().state == "SUCCEEDED"


def test_jobs_of_other_names_at_the_same_store_are_other_jobs(job):
    store = job.start_store()
    job.terms["nnodes"] = 1
    nodes = [job.start(tasks.who, terms={"run_id": name}) for name in ("one", "two")]
    assert [outcome.values[0]["run_id"] for outcome in job.outcomes(nodes)] == ["one", "two"]
    store.kill()
    store.exit_status()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rendezvous": "node0:29400"}, TypeError, "rendezvous must be a Rendezvous, such as"),
        (
            {"restart_policy": mpwatch.RestartPolicy(1, scope="worker")},
            ValueError,
            "over several nodes all ranks are started again",
        ),
    ],
)
def test_what_a_run_of_several_nodes_cannot_have(options, error, text):
    with pytest.raises(error, match=text):
        mpwatch.run(int, 1, **{"rendezvous": mpwatch.Rendezvous("node0:29400", "job", 2), **options})
