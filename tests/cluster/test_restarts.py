"""What the driver of a job on a cluster decides when all nodes are lost."""

import mpwatch
from mpwatch.cluster.restarts import JobRestarts
from mpwatch.events import RendezvousCompleted, Restarting, RunEnded, Stopping
from mpwatch.multinode.protocol.messages import RestartHistory

BASE = {"monotonic": 0.0, "run_id": "job", "ranks": (0,)}
LOSS = mpwatch.ProcessFailure(
    rank=1,
    local_rank=0,
    pid=None,
    hostname="host1",
    group_rank=1,
    kind=mpwatch.FailureKind.LOST,
    exit_code=1,
    evidence="gone",
)


def make_restarts(max_restarts=3, **options):
    return JobRestarts(mpwatch.RestartPolicy(max_restarts, **options), "job")


def start(restarts, attempt):
    """Let both nodes publish that this attempt starts."""
    for node in range(2):
        facts = {
            "job": "job",
            "backend": "c10d",
            "group_world_size": 2,
            "world_size": 2,
            "role_rank": 0,
            "role_world_size": 2,
        }
        restarts.handle_event(
            RendezvousCompleted(
                **BASE, **facts, time=10.0 * attempt, attempt=attempt, group_rank=node, master_addr="host0", master_port=1
            )
        )


def restart(restarts, attempt, restarts_left, **facts):
    """Let both nodes publish that they restart the ranks."""
    for _ in range(2):
        restarts.handle_event(
            Restarting(
                **BASE, time=10.0 * attempt + 5, attempt=attempt, cause=None, delay=0, restarts_left=restarts_left, **facts
            )
        )


def lose_all(restarts):
    return restarts.lose_all([LOSS], 100.0, 100.0)


def test_new_nodes_go_on_with_the_history_of_the_lost_ones():
    restarts = make_restarts()
    start(restarts, 0)
    restart(restarts, 0, restarts_left=2)
    start(restarts, 1)
    history, event = lose_all(restarts)
    assert history == RestartHistory(attempts=2, restarts_used=2)
    assert (event.attempt, event.restarts_left, event.cause.rank, event.ranks) == (1, 1, 1, (0, 1))
    result = restarts.complete(mpwatch.RunResult(state=mpwatch.WorkerState.SUCCEEDED))
    assert [(attempt.number, attempt.is_counted) for attempt in result.attempts] == [(0, False), (1, True)]
    assert result.attempts[1].elapsed == 90.0


def test_the_result_of_new_nodes_is_completed():
    restarts = make_restarts()
    start(restarts, 0)
    lose_all(restarts)
    attempt = mpwatch.Attempt(number=1, ranks=(0, 1), started_at=0.0, elapsed=1.0, state=mpwatch.WorkerState.SUCCEEDED)
    result = restarts.complete(mpwatch.RunResult(state=mpwatch.WorkerState.SUCCEEDED, attempts=(attempt,)))
    assert [attempt.name for attempt in result.attempts] == ["first start, 100.0 s", "restart 1, 1.0 s"]
    assert result.restarts == 1


def test_a_start_for_new_nodes_is_no_restart():
    restarts = make_restarts(1)
    start(restarts, 0)
    restart(restarts, 0, restarts_left=1, is_counted=False)
    start(restarts, 1)
    history, _ = lose_all(restarts)
    assert history == RestartHistory(attempts=2, restarts_used=1)


def test_nodes_that_are_lost_while_they_meet_again_have_counted_the_restart():
    restarts = make_restarts(1)
    start(restarts, 0)
    restart(restarts, 0, restarts_left=0)
    history, event = lose_all(restarts)
    assert history == RestartHistory(attempts=1, restarts_used=1)
    assert not event.is_counted


def test_restarts_are_limited():
    restarts = make_restarts(1)
    for attempt in range(2):
        start(restarts, attempt)
        is_restarted = lose_all(restarts) is not None
    assert not is_restarted
    assert restarts.not_restarted == "all restarts are used up (max_restarts=1)"


def test_a_policy_without_restarts_has_no_reason():
    restarts = make_restarts(0)
    start(restarts, 0)
    assert lose_all(restarts) is None
    assert restarts.not_restarted == ""


def test_a_job_that_was_asked_to_stop_is_not_restarted():
    restarts = make_restarts()
    start(restarts, 0)
    restarts.handle_event(Stopping(**BASE, time=1.0, stop_cause="SIGUSR2", after_step=7))
    assert lose_all(restarts) is None
    assert restarts.not_restarted == "a stop was requested (SIGUSR2)"


def test_a_job_that_had_ended_is_not_restarted():
    restarts = make_restarts()
    start(restarts, 0)
    restarts.handle_event(
        RunEnded(**BASE, time=1.0, state=mpwatch.WorkerState.SUCCEEDED, elapsed=1.0, restarts=0, reason="")
    )
    assert lose_all(restarts) is None
    assert restarts.not_restarted == "the ranks had ended before that"


def test_a_node_that_could_not_join_does_not_end_the_job():
    restarts = make_restarts()
    start(restarts, 0)
    facts = {**BASE, "ranks": (), "state": mpwatch.WorkerState.FAILED, "elapsed": 1.0, "restarts": 0, "reason": ""}
    restarts.handle_event(RunEnded(**facts, time=1.0))
    assert lose_all(restarts) is not None
