"""Nodes that cannot form a job end in time, and say what is wrong."""

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
def _impatience(job):
    job.rendezvous["join_timeout"] = 6.0  # long enough to be refused by another node on a busy machine


IMPATIENT = pytest.mark.usefixtures("_impatience")


def assert_refused(outcome, *texts):
    assert type(outcome.error) is mpwatch.LaunchError
    for text in texts:
        assert re.search(text, str(outcome.error)), str(outcome.error)


@IMPATIENT
@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({}, {"function": tasks.another_function}, "disagree about the function: another_function on .*, follow_order on "),
        pytest.param({"max_restarts": 1}, {"max_restarts": 2}, "restart", marks=pytest.mark.slow),
    ],
)
def test_nodes_that_make_different_calls_are_refused(job, first, second, text):
    job.start(**first)
    other = job.start(**second)
    for outcome in job.outcomes():
        assert_refused(outcome, text, other.hostname)


@pytest.mark.parametrize(
    ("rendezvous", "text"),
    [({"secret": "of somebody else"}, "signed with another secret"), ({}, "signed, but this node has no secret")],
)
def test_a_node_with_another_secret_is_refused(job, rendezvous, text):
    first, other = job.start(rendezvous={"secret": "of the job"}), job.start(rendezvous=rendezvous)
    assert_refused(other.outcome(), text)
    first.send(signal.SIGTERM)
    first.exit_status()


@IMPATIENT
def test_too_few_nodes_are_reported_in_time(job):
    job.rendezvous["nnodes"] = 3
    assert_refused(job.start().outcome(), rf"127\.0\.0\.1:{job.port}: 1 of 3 nodes had joined")


@IMPATIENT
def test_an_endpoint_where_nobody_is_is_named(job):
    job.start(rendezvous={"is_host": False})
    assert_refused(job.nodes[0].outcome(), rf"127\.0\.0\.1:{job.port}: nothing listens there\. .* is_host=True")


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


@IMPATIENT
@pytest.mark.parametrize("is_host", [True, False])
def test_a_port_that_a_silent_program_has_taken_is_named(job, is_host):
    with closing(socket.create_server(("127.0.0.1", job.port))):
        outcome = job.start(rendezvous={"is_host": is_host}).outcome()
    assert_refused(outcome, f"port {job.port} is taken" if is_host else "does not answer as mpwatch")


@IMPATIENT
def test_a_node_beyond_the_maximum_and_one_of_another_job_are_refused(job):
    job.rendezvous["nnodes"] = 1
    first = job.start()
    world = job.await_world(1)
    beyond, other = job.start(), job.start(rendezvous={"run_id": "other"})
    assert_refused(beyond.outcome(), r"the job has its maximum number of nodes \(1\)")
    assert_refused(other.outcome(), "job 'job' is here, not 'other'")
    world.order("return")
    job.results([first])


def test_a_timeout_that_ends_before_the_nodes_have_met_is_named(job):
    outcome = job.start(timeout=0.5).outcome()
    assert_refused(outcome, r"`timeout` \(0\.5 s\) ran out before the nodes had joined: rendezvous of job")


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
