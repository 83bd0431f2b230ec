"""Jobs of several nodes under what nobody would do to them on purpose, and some would."""

import signal

import pytest
from torch.distributed import PrefixStore, TCPStore

from mpwatch.multinode.protocol.signed_json import SignedJson

from . import tasks

AT_ONCE = 1.5  # seconds, of which a poll takes a part, and the end of ranks another
CLEARS = "\x1b[2J"  # a terminal


def assert_success(outcomes):
    for outcome in outcomes:
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")


@pytest.mark.parametrize("step", [-5, 1 << 60])
def test_any_step_may_be_reported(job, step):
    """A message that the chair could not read would be waited for until the end of days."""
    job.start_several(2, tasks.reports, args=(step,))
    assert_success(job.outcomes())


@pytest.mark.parametrize(
    "body", [{"host": CLEARS, "terms": {"items": []}}, {"host": "host0", "terms": {"items": [["the function", CLEARS]]}}]
)
def test_what_a_stranger_has_written_as_the_terms_of_the_job_reaches_no_terminal(job, body):
    store = job.start_store()
    write_for_the_job(job, "terms", body)
    outcome = job.start().outcome()
    store.kill()
    store.exit_status()
    assert outcome.error == "LaunchError"
    assert "what the first node of the job has written cannot be read" in outcome.text
    assert CLEARS not in outcome.text


def test_nor_does_what_he_says_of_a_node_that_was_refused(job):
    job.terms["join_timeout"] = 3.0
    store = job.start_store()
    write_for_the_job(job, "refused", {"host": "host0", "reason": CLEARS})
    outcome = job.start().outcome()
    store.kill()
    store.exit_status()
    assert "1 of 2 nodes had come" in outcome.text
    assert CLEARS not in outcome.text


def write_for_the_job(job, key, body):
    host, _, port = job.terms["endpoint"].rpartition(":")
    store = PrefixStore(f"mpwatch.{job.terms['run_id']}", TCPStore(host, int(port), wait_for_workers=False))
    store.set(key, SignedJson(b"", job.terms["run_id"]).close(key, body))


def test_environments_that_were_made_too_late_are_for_no_other_attempt(job):
    """While the ranks of the other node are being stopped, those of this one come to be ready to start."""
    options = {"max_restarts": 1, "grace_period": 2.5}
    job.start(tasks.fails_first_time, 2, **options)
    job.start(tasks.fails_first_time, 2, env="takes_its_time", **options)
    outcomes = job.outcomes()
    assert_success(outcomes)
    assert {worker["restart_count"] for outcome in outcomes for worker in outcome.workers} == {1}


def test_where_the_callers_own_code_fails_on_one_node_all_say_so(job):
    """And not that a signal has come there, by which the ranks are stopped then; nor does anybody wait for that node."""
    asked, broken = job.start(), job.start(env="breaks_down")
    outcome = asked.outcome()
    assert broken.outcome().error == "BrokenDownError"
    assert outcome.error == "RunFailedError"
    assert outcome.text.startswith(f"node 1 ({broken.hostname}): BrokenDownError: rank 1 cannot be")
    assert "SIG" not in outcome.text


def test_a_node_that_serves_the_store_leaves_when_all_know_that(job):
    leaving, other = job.start_several(2, grace_period=20.0)
    job.await_world(2)
    at = leaving.send(signal.SIGINT)
    assert leaving.outcome().ended - at < AT_ONCE
    assert "SIGINT" in other.outcome().text


def test_a_job_that_waits_in_vain_for_a_substitute_tells_what_it_has_lost(job):
    job.terms["join_timeout"] = 4.0
    kept, lost = job.start_several(2, max_restarts=1)
    job.await_world(2)
    lost.kill()
    outcome = kept.outcome()
    assert outcome.text.startswith(f"rank 1 on node 1 ({lost.hostname}) was lost: no sign of life")
    assert "1 of 2 nodes had come" in outcome.not_restarted
    assert outcome.root_cause["hostname"] == lost.hostname
    assert outcome.attempts == [{"number": 0, "state": "FAILED", "cause": 1}]


def test_a_chair_that_was_stopped_for_too_long_comes_back_as_a_newcomer(job):
    """The others have gone on without it, and it neither ends their job nor takes them for lost."""
    store = job.start_store()
    job.terms["nnodes"] = 2, 3
    job.start_several(3, max_restarts=0)
    first = job.await_world(3)
    chair = next(node for node in job.nodes if node.name == first[0].node)
    chair.send(signal.SIGSTOP)
    job.await_world(2)
    chair.send(signal.SIGCONT)
    job.await_world(3).order("return")
    assert_success(job.outcomes([node for node in job.nodes if node is not store]))
    store.kill()
    store.exit_status()


def test_a_timeout_that_runs_out_before_the_nodes_meet_is_named(job):
    outcome = job.start(timeout=1.0).outcome()
    assert outcome.error == "LaunchError"
    assert outcome.text.startswith("`timeout` (1 s) ran out before the nodes had met: rendezvous of job")


def test_an_attempt_is_told_of_once_though_another_was_called_off_before_it_began(job):
    options = {"max_restarts": 1, "grace_period": 0.5}
    job.start(tasks.fails_first_time, 2, env="takes_its_time_again", **options)
    job.start(tasks.fails_first_time, 2, env="breaks_down_again", **options)
    outcome, broken = job.outcomes()
    assert broken.error == "BrokenDownError"
    assert outcome.text.startswith(f"node 1 ({broken.hostname}): BrokenDownError: rank 2 cannot be")
    assert outcome.attempts == [{"number": 0, "state": "FAILED", "cause": 1}]
    assert outcome.events.count("worker_failed") == 1
