"""Jobs of several nodes under extreme values, attacks on the store, and rare orders of events."""

import signal

import pytest
from torch.distributed import PrefixStore, TCPStore

from mpwatch.multinode.protocol.signed_json import SignedJson
from nodes import tasks
from nodes.harness import AT_ONCE

CLEAR_SCREEN = "\x1b[2J"


def assert_success(outcomes):
    for outcome in outcomes:
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")


@pytest.mark.parametrize("step", [-5, 1 << 60])
def test_any_step_may_be_reported(job, step):
    """The leader waits for the report of each node, so it must be able to read each one."""
    job.start_several(2, tasks.report_step, args=(step,))
    assert_success(job.outcomes())


@pytest.mark.parametrize(
    "body",
    [
        {"hostname": CLEAR_SCREEN, "job_config": {"items": []}},
        {"hostname": "host0", "job_config": {"items": [["the function", CLEAR_SCREEN]]}},
    ],
)
def test_control_characters_in_a_job_config_of_another_program_reach_no_terminal(job, body):
    store = job.start_store()
    write_into_job_store(job, "job_config", body)
    outcome = job.start().outcome()
    store.kill()
    store.exit_status()
    assert outcome.error == "LaunchError"
    assert "what the first node of the job has written cannot be read" in outcome.text
    assert CLEAR_SCREEN not in outcome.text


def test_control_characters_in_the_reason_of_a_refusal_reach_no_terminal(job):
    job.rendezvous["join_timeout"] = 3.0
    store = job.start_store()
    write_into_job_store(job, "refused", {"hostname": "host0", "reason": CLEAR_SCREEN})
    outcome = job.start().outcome()
    store.kill()
    store.exit_status()
    assert "1 of 2 nodes had joined" in outcome.text
    assert CLEAR_SCREEN not in outcome.text


def test_a_restart_history_of_another_program_is_an_error(job):
    job.rendezvous["nnodes"] = 1
    store = job.start_store()
    write_into_job_store(job, "history", {"attempts": CLEAR_SCREEN})
    outcome = job.start().outcome()
    store.kill()
    store.exit_status()
    assert outcome.error == "LaunchError"
    assert "the restart history of the job cannot be read" in outcome.text
    assert CLEAR_SCREEN not in outcome.text


def write_into_job_store(job, key, body):
    host, _, port = job.rendezvous["endpoint"].rpartition(":")
    store = PrefixStore(f"mpwatch.{job.rendezvous['run_id']}", TCPStore(host, int(port), wait_for_workers=False))
    store.set(key, SignedJson(b"", job.rendezvous["run_id"]).encode(key, body))


def test_environments_that_are_ready_too_late_are_not_used_for_another_attempt(job):
    """The ranks of one node become ready to start while those of the other node are being stopped."""
    options = {"max_restarts": 1, "grace_period": 2.5}
    job.start(tasks.fail_in_first_attempt, 2, **options)
    job.start(tasks.fail_in_first_attempt, 2, env="slow_env", **options)
    outcomes = job.outcomes()
    assert_success(outcomes)
    assert {worker["restart_count"] for outcome in outcomes for worker in outcome.workers} == {1}


@pytest.mark.parametrize(("env", "error"), [("failing_env", "RankError"), ("exiting_env", "SystemExit")])
def test_an_error_in_the_callers_code_on_one_node_is_reported_by_all(job, env, error):
    """The other node does not report the signal that stops the ranks there, and does not wait for that node."""
    healthy, broken = job.start(), job.start(env=env)
    outcome = healthy.outcome()
    assert broken.outcome().error == error
    assert outcome.error == "RunFailedError"
    assert outcome.text.startswith(f"node 1 ({broken.hostname}): {error}: rank 1 cannot be")
    assert "SIG" not in outcome.text


def test_a_node_that_serves_the_store_leaves_when_all_others_know_that_it_leaves(job):
    leaving, other = job.start_several(2, grace_period=20.0)
    job.await_world(2)
    at = leaving.send(signal.SIGINT)
    assert leaving.outcome().ended - at < AT_ONCE
    assert "SIGINT" in other.outcome().text


def test_a_job_that_gets_no_replacement_reports_the_node_that_it_has_lost(job):
    job.rendezvous["join_timeout"] = 4.0
    kept, lost = job.start_several(2, max_restarts=1)
    job.await_world(2)
    lost.kill()
    outcome = kept.outcome()
    assert outcome.text.startswith(f"node 1 ({lost.hostname}) with rank 1 was lost: its program sent no sign of life")
    assert "1 of 2 nodes had joined" in outcome.notes[-1]
    assert outcome.root_cause["hostname"] == lost.hostname
    assert outcome.attempts == [{"number": 0, "state": "FAILED", "cause": 1}]
    assert [line for line in kept.log.splitlines() if "waiting" in line] == [
        "waiting up to 4 s for another node (present: 1 of 2)"
    ]


def test_a_leader_that_was_stopped_for_too_long_joins_again_as_a_newcomer(job):
    """The others have gone on without it. It does not end their job, and does not count them as lost."""
    store = job.start_store()
    job.rendezvous["nnodes"] = 2, 3
    job.start_several(3, max_restarts=0)
    first = job.await_world(3)
    leader = next(node for node in job.nodes if node.name == first[0].node)
    leader.send(signal.SIGSTOP)
    job.await_world(2)
    leader.send(signal.SIGCONT)
    job.await_world(3).order("return")
    assert_success(job.outcomes([node for node in job.nodes if node is not store]))
    store.kill()
    store.exit_status()


def test_a_timeout_that_ends_before_the_first_round_is_named(job):
    outcome = job.start(timeout=1.0).outcome()
    assert outcome.error == "LaunchError"
    assert outcome.text.startswith("`timeout` (1 s) ran out before the nodes had joined: rendezvous of job")


def test_an_attempt_is_reported_once_if_the_next_one_was_cancelled_before_its_start(job):
    options = {"max_restarts": 1, "grace_period": 0.5}
    job.start(tasks.fail_in_first_attempt, 2, env="slow_env_at_restart", **options)
    job.start(tasks.fail_in_first_attempt, 2, env="failing_env_at_restart", **options)
    outcome, broken = job.outcomes()
    assert broken.error == "RankError"
    assert outcome.text.startswith(f"node 1 ({broken.hostname}): RankError: rank 2 cannot be")
    assert outcome.attempts == [{"number": 0, "state": "FAILED", "cause": 1}]
    assert outcome.events.count("worker_failed") == 1
