"""What the driver of a job on a cluster does by itself: attempts of lost nodes, results, connections."""

import mpwatch
from mpwatch.cluster.attempts import JobAttempts
from mpwatch.cluster.results import merge_results
from mpwatch.events import RendezvousCompleted, Restarting

BASE = {"monotonic": 0.0, "run_id": "job", "ranks": (0,)}
OF_ROUND = {"group_world_size": 2, "world_size": 2, "role_rank": 0, "role_world_size": 2, "master_port": 1}
LOSS = mpwatch.ProcessFailure(
    rank=1, local_rank=0, pid=None, hostname="host1", group_rank=1, kind=mpwatch.FailureKind.LOST, exit_code=1
)


def test_the_attempts_of_lost_nodes_are_kept():
    job = JobAttempts()

    def start(attempt):
        facts = {"time": 10.0 * attempt, "attempt": attempt, "job": "job", "master_addr": "host0"}
        for node in range(2):  # each node publishes all events
            job.handle_event(RendezvousCompleted(**BASE, **OF_ROUND, **facts, group_rank=node))

    def restart(attempt):
        known = {"time": 10.0 * attempt + 5, "attempt": attempt, "cause": None, "delay": 0, "restarts_left": 1}
        for _ in range(2):
            job.handle_event(Restarting(**BASE, **known))

    start(0)
    restart(0)
    start(1)
    assert job.end(100.0, LOSS, {1: LOSS}) == (0, 1)
    restart(1)
    last = mpwatch.Attempt(number=2, ranks=(0, 1), started_at=0.0, elapsed=1.0, state=mpwatch.WorkerState.SUCCEEDED)
    result = job.complete(mpwatch.RunResult(state=mpwatch.WorkerState.SUCCEEDED, attempts=(last,)))
    assert [attempt.name for attempt in result.attempts] == ["first start, 5.0 s", "restart 1, 90.0 s", "restart 2, 1.0 s"]
    assert result.attempts[1].root_cause is LOSS


def test_the_reason_is_that_of_a_node_that_the_driver_has_not_stopped():
    by_driver = "the run was stopped: terminate() was called, before its ranks were started"
    own = "the run was stopped: a stop was requested, before its ranks were started"
    for reasons, chosen in (([by_driver, own], own), ([own, by_driver], own), (["", by_driver], by_driver)):
        results = [mpwatch.RunResult(mpwatch.WorkerState.STOPPED, reason=reason) for reason in reasons]
        assert merge_results(results).reason == chosen
