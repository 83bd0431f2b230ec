"""Nodes that cannot form a job end in time, and say what is wrong."""

import os
import re
import signal
import socket
import threading
from contextlib import closing

import pytest

import mpwatch
from nodes import tasks
from nodes.harness import WAIT_SECONDS


@pytest.fixture
def job(job):
    """A job that waits for its nodes long enough for a refusal by another one on a busy machine, and no longer."""
    job.rendezvous["join_timeout"] = 6.0
    return job


def assert_refused(outcome, *texts):
    assert type(outcome.error) is mpwatch.LaunchError
    for text in texts:
        assert re.search(text, str(outcome.error)), str(outcome.error)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({}, {"function": os.getpid}, "disagree about the function: .*getpid on .*, .*follow_order on "),
        pytest.param({"max_restarts": 1}, {"max_restarts": 2}, "restart", marks=pytest.mark.slow),
    ],
)
def test_nodes_that_make_different_calls_are_refused(job, first, second, text):
    job.start(**first)
    other = job.start(**second)
    for outcome in job.outcomes():
        assert_refused(outcome, text, other.hostname)


def test_a_node_with_another_secret_is_refused(job):
    first, other = (job.start(rendezvous={"secret": f"of node {number}"}) for number in range(2))
    assert_refused(other.outcome(), "signed with another secret")
    first.send(signal.SIGTERM)
    first.exit_status()


@pytest.mark.parametrize(
    ("rendezvous", "options", "text"),
    [
        ({"nnodes": 3}, {}, "1 of 3 nodes had joined"),
        ({"is_host": False}, {}, r"nothing listens there\. .* is_host=True"),
        ({}, {"timeout": 0.5}, r"`timeout` \(0\.5 s\) ran out before the nodes had joined: rendezvous of job"),
    ],
)
def test_a_node_that_stays_alone_says_where_and_why(job, rendezvous, options, text):
    outcome = job.start(rendezvous=rendezvous, **options).outcome()
    assert_refused(outcome, text, rf"127\.0\.0\.1:{job.port}")


@pytest.fixture
def name_service(monkeypatch):
    """An event that is set when a name service that does not answer has been asked."""
    asked, is_over = threading.Event(), threading.Event()

    def hang(*_, **__):
        asked.set()
        is_over.wait(WAIT_SECONDS)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    yield asked
    is_over.set()
    for thread in threading.enumerate():
        if thread.name == "mpwatch-resolver":
            thread.join(WAIT_SECONDS)


def test_a_name_service_that_does_not_answer_delays_no_timeout_and_no_stop(name_service):
    rendezvous = mpwatch.Rendezvous("host.invalid", "job", 2)
    with pytest.raises(mpwatch.LaunchError, match=r"`timeout` .* 'host\.invalid' cannot be resolved \(no answer in time\)"):
        mpwatch.run(print, 1, rendezvous=rendezvous, timeout=0.5)
    name_service.clear()
    handle = mpwatch.submit(print, 1, rendezvous=rendezvous)
    assert name_service.wait(WAIT_SECONDS)
    handle.terminate()
    with pytest.raises(mpwatch.RunFailedError, match="terminate"):
        handle.result(timeout=WAIT_SECONDS / 2)


@pytest.mark.parametrize("is_host", [True, False])
def test_a_port_that_a_silent_program_has_taken_is_named(job, is_host):
    port = job.port
    with closing(socket.create_server(("127.0.0.1", port))):
        outcome = job.start(rendezvous={"is_host": is_host}).outcome()
    assert_refused(outcome, f"port {port} is taken" if is_host else "does not answer as mpwatch")


def test_a_node_beyond_the_maximum_and_one_of_another_job_are_refused(job):
    job.rendezvous["nnodes"] = 1
    first = job.start()
    world = job.await_world(1)
    beyond, other = job.start(), job.start(rendezvous={"run_id": "other"})
    assert_refused(beyond.outcome(), r"the job has its maximum number of nodes \(1\)")
    assert_refused(other.outcome(), "job 'job' is here, not 'other'")
    world.order("return")
    job.results([first])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"env": tasks.failing_env}, "RankError: rank 1 cannot be"),
        ({"nprocs": 9999, "placement": "cores"}, "Placement: cpus='cores' needs a CPU for each of the 9999 ranks"),
    ],
)
def test_an_error_on_one_node_before_its_ranks_start_ends_the_job_and_is_reported_by_all(job, options, text):
    """The other node does not report the signal that stops the ranks there, and does not wait for that node."""
    healthy, broken = job.start(), job.start(**options)
    outcome = healthy.outcome()
    assert text.partition(": ")[2] in str(broken.outcome().error)
    assert text in str(outcome.error)
    assert "SIG" not in str(outcome.error)
