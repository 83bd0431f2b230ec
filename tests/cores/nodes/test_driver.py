"""What the driver of a job on a cluster decides by itself: restarts when all nodes are lost, waits, results, connections."""

import os
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

import mpwatch
from mpwatch.cluster.links import NodeLinks
from mpwatch.cluster.restarts import JobRestarts
from mpwatch.cluster.results import merge_results
from mpwatch.cluster.signed_connection import SignedConnection
from mpwatch.events import RendezvousCompleted, Restarting, RunEnded, Stopping
from mpwatch.nodes.messages import RestartHistory

BASE = {"monotonic": 0.0, "run_id": "job", "ranks": (0,)}
OF_ROUND = {"group_world_size": 2, "world_size": 2, "role_rank": 0, "role_world_size": 2, "master_port": 1}
ENDED = {**BASE, "time": 1.0, "elapsed": 1.0, "restarts": 0, "reason": ""}
LOSS = mpwatch.ProcessFailure(
    rank=1, local_rank=0, pid=None, hostname="host1", group_rank=1, kind=mpwatch.FailureKind.LOST, exit_code=1
)


class DrivenJob(JobRestarts):
    """A job of two nodes, each of which publishes all events."""

    def __init__(self, max_restarts):
        super().__init__(mpwatch.RestartPolicy(max_restarts), "job")

    def start(self, attempt):
        facts = {"time": 10.0 * attempt, "attempt": attempt, "job": "job", "master_addr": "host0"}
        for node in range(2):
            self.handle_event(RendezvousCompleted(**BASE, **OF_ROUND, **facts, group_rank=node))

    def restart(self, attempt, restarts_left, **facts):
        known = {"time": 10.0 * attempt + 5, "attempt": attempt, "cause": None, "delay": 0}
        for _ in range(2):
            self.handle_event(Restarting(**BASE, **known, restarts_left=restarts_left, **facts))

    def lose_nodes(self):
        return self.lose_all([LOSS], 100.0, 100.0)


def test_new_nodes_go_on_with_the_history_of_the_lost_ones():
    job = DrivenJob(3)
    job.start(0)
    job.restart(0, restarts_left=2)
    job.start(1)
    history, event = job.lose_nodes()
    assert history == RestartHistory(attempts=2, restarts_used=2)
    assert (event.attempt, event.restarts_left, event.cause.rank, event.ranks) == (1, 1, 1, (0, 1))
    last = mpwatch.Attempt(number=2, ranks=(0, 1), started_at=0.0, elapsed=1.0, state=mpwatch.WorkerState.SUCCEEDED)
    result = job.complete(mpwatch.RunResult(state=mpwatch.WorkerState.SUCCEEDED, attempts=(last,)))
    assert [attempt.name for attempt in result.attempts] == ["first start, 5.0 s", "restart 1, 90.0 s", "restart 2, 1.0 s"]


@pytest.mark.parametrize(
    ("max_restarts", "event", "reason"),
    [
        (0, None, ""),
        (3, Stopping(**BASE, time=1.0, stop_cause="SIGUSR2", after_step=7), "a stop was requested (SIGUSR2)"),
        (3, RunEnded(**ENDED, state=mpwatch.WorkerState.SUCCEEDED), "the ranks had ended before that"),
    ],
)
def test_a_job_is_not_restarted(max_restarts, event, reason):
    job = DrivenJob(max_restarts)
    job.start(0)
    job.handle_event(event)
    assert job.lose_nodes() is None
    assert job.not_restarted == reason


def test_restarts_are_limited_and_a_node_that_could_not_join_does_not_end_the_job():
    job = DrivenJob(1)
    job.start(0)
    job.handle_event(RunEnded(**ENDED | {"ranks": ()}, state=mpwatch.WorkerState.FAILED))
    assert job.lose_nodes() is not None
    job.start(1)
    assert job.lose_nodes() is None
    assert job.not_restarted == "all restarts are used up (max_restarts=1)"


def test_the_reason_is_that_of_a_node_that_the_driver_has_not_stopped():
    by_driver = "the run was stopped: terminate() was called, before its ranks were started"
    own = "the run was stopped: a stop was requested, before its ranks were started"
    for reasons, chosen in (([by_driver, own], own), ([own, by_driver], own), (["", by_driver], by_driver)):
        results = [mpwatch.RunResult(mpwatch.WorkerState.STOPPED, reason=reason) for reason in reasons]
        assert merge_results(results).reason == chosen


def test_lost_nodes_and_programs_without_the_key_leave_no_descriptor(eventually):
    def count_descriptors():
        return len(os.listdir("/proc/self/fd"))

    links = NodeLinks("127.0.0.1", b"secret", lambda *_: None)
    before = count_descriptors()
    for number in range(3):
        with pytest.raises(AuthenticationError):
            Client(links.address, authkey=b"another secret")
        with Client(links.address, authkey=b"secret") as node:
            link = SignedConnection(node, b"secret", is_driver=False)
            link.send(("hello", (number, "host")))
            _, _, (_, connection) = links.messages.get()
            node.send(("done", None))  # by somebody else, who cannot sign
        assert links.messages.get() == ("closed", number, connection)
        links.release(connection)
    eventually(lambda: count_descriptors() == before)
    links.close()
