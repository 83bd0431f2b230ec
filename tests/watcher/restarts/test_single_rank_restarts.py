"""Ranks that are restarted or fail alone (`scope="worker"`, `keep_going`), with real processes. The other ranks go on."""

import os
import pickle

import pytest

import mpwatch
from mpwatch import RestartPolicy, WorkerState
from mpwatch.events import Restarting, StateChanged, WorkerFailed, WorkerStarted, WorkerSucceeded
from support import failing
from support.process_state import SPAWN
from support.runs import at, failed, of_kind
from watcher.restarts import attempt_functions

LONG = 1000.0  # seconds; no test waits so long


def test_only_the_failed_rank_is_restarted_and_the_group_is_unhealthy_until_then(barrier):
    def run_until_one_was_restarted(barrier, end):
        if failing.rank() != 1 or attempt_functions.attempt() == 0:
            barrier.wait()
        if failing.rank() == 1 and attempt_functions.attempt() == 0:
            raise ValueError("the first time")
        end.wait()
        return attempt_functions.describe_self()

    end = SPAWN.Event()
    on_event = at(StateChanged, end.set, before=WorkerState.UNHEALTHY, after=WorkerState.HEALTHY)
    options = {"max_restarts": RestartPolicy(scope="worker"), "on_event": on_event}
    result = mpwatch.run(run_until_one_was_restarted, 3, args=(barrier, end), **options)
    assert [attempt for attempt, *_ in result] == [0, 1, 0]
    assert len({port for _, port, *_ in result}) == 1
    assert [variables["TORCHELASTIC_RESTART_COUNT"] for _, _, variables, _ in result] == ["0", "1", "0"]
    assert [worker.restart_count for worker in result.workers] == [0, 1, 0]
    starts = {(event.ranks[0], event.attempt): event.pid for event in of_kind(WorkerStarted, result.events)}
    assert starts.pop((1, 0))
    assert starts == {(rank, attempt): pid for rank, (attempt, *_, pid) in result.items()}
    states = [event.after.name for event in of_kind(StateChanged, result.events)]
    assert states == ["INIT", "HEALTHY", "UNHEALTHY", "HEALTHY", "SUCCEEDED"]
    first, *others = result.attempts
    assert (first.number, first.ranks, first.state, set(first.failures)) == (0, (1,), WorkerState.FAILED, {1})
    assert sorted((attempt.number, attempt.ranks) for attempt in others) == [(0, (0,)), (0, (2,)), (1, (1,))]


def test_each_rank_has_its_own_restarts():
    calls = []
    env = lambda worker: calls.append((worker.rank, worker.restart_count)) or {}  # noqa: E731
    result = mpwatch.run(
        attempt_functions.raises_by_itself, 3, args=(0,), max_restarts=RestartPolicy(scope="worker"), env=env
    )
    assert (list(result), result.restarts, len(result.attempts)) == ([0, 1, 2], 3, 6)
    left = {(event.ranks[0], event.attempt): event.restarts_left for event in of_kind(Restarting, result.events)}
    assert left == {(1, 0): 2, (2, 0): 2, (2, 1): 1}
    assert sorted(calls) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]


def test_a_rank_that_is_not_restarted_ends_the_run_while_another_awaits_its_restart():
    def fail(has_failed):
        if failing.rank() == 0:
            raise ValueError("restart, please")
        has_failed.wait()
        if failing.rank() == 1:
            raise KeyError("no restart")
        failing.wait_to_be_stopped()

    has_failed = SPAWN.Event()
    policy = RestartPolicy(scope="worker", delay=LONG, max_delay=LONG, retry_if=ValueError)
    options = {"max_restarts": policy, "on_event": at(Restarting, has_failed.set, ranks=(0,))}
    error = failed(fail, 3, args=(has_failed,), **options)
    result = error.result
    assert str(error).startswith("rank 1 failed first: KeyError: 'no restart'")
    assert type(error.__cause__) is KeyError
    assert set(result.failures) == {0, 1}
    assert (result.restarts, result.worker_states[2]) == (0, WorkerState.STOPPED)
    assert result.notes == ("not restarted: `retry_if` does not allow a restart after this failure",)


def test_ranks_that_fail_for_good_do_not_stop_the_others(caplog):
    """The event is set when the caller has seen all failures, while the other ranks are running."""
    end = SPAWN.Event()
    options = {"max_restarts": 1, "keep_going": True, "on_event": at(WorkerFailed, end.set, 4)}
    error = failed(attempt_functions.fails_on_odd_ranks, 4, args=(end,), **options)
    result = error.result
    assert sorted(event.ranks for event in of_kind(Restarting, result.events)) == [(1,), (3,)]
    assert dict(result.return_values) == {0: 0, 2: 20}
    assert (list(result.values()), len(result), result[2], result[-2], result[:1]) == ([0, 20], 4, 20, 20, [0])
    assert set(result.failures) == {1, 3}
    assert str(error).startswith("2 of 4 ranks failed; ")
    assert isinstance(error.__cause__, ValueError) == (error.root_cause.rank == 1)
    assert "ranks 0, 2: had returned" in str(error)
    assert [result.worker_states[rank].name for rank in range(4)] == ["SUCCEEDED", "FAILED"] * 2
    assert sum(text.endswith("no other rank is stopped, because of keep_going=True") for text in caplog.messages) == 2
    with pytest.raises(LookupError, match=r"^rank 1 has no value: ValueError: bad shard") as missing:
        result[1]
    assert missing.value.__cause__ is result.failures[1].exception
    with pytest.raises(LookupError, match="rank 1 has no value"):
        list(result)


def test_all_ranks_may_fail():
    error = failed(failing.raises_value_error, 2, keep_going=True)
    assert str(error).startswith("2 of 2 ranks failed; ")
    assert (len(error.result), dict(error.result.items())) == (2, {})


def test_a_timeout_keeps_what_was_returned_by_then():
    fn = lambda: failing.rank() or failing.wait_to_be_stopped()  # noqa: E731
    result = mpwatch.run(fn, 2, keep_going=True, timeout=3.0, grace_period=0, check=False)
    assert dict(result.return_values) == {1: 1}
    assert result.reason == "the run did not end within timeout=3 s: rank 0 had not returned"


def test_a_failure_without_keep_going_keeps_the_values_that_were_returned_before_it():
    class CannotBeUnpickled:
        def __reduce__(self):
            return os.stat, ("/not/here",)

    def fail_when_the_others_have_returned(end):
        if failing.rank() == 3:
            assert end.wait(60)
            raise ValueError("bad shard")
        return [None, CannotBeUnpickled(), lambda: 1][failing.rank()]  # plain pickle refuses the lambda

    end = SPAWN.Event()
    observe = at(WorkerSucceeded, end.set, 3)
    original = failed(fail_when_the_others_have_returned, 4, args=(end,), on_event=observe)
    assert str(original).startswith("rank 3 failed first: ValueError: bad shard")
    for error in (original, pickle.loads(pickle.dumps(original))):
        result = error.result
        assert (list(result.return_values), result[0], result[2]()) == ([0, 2], None, 1)
        assert list(result.failures) == [3]
        (note,) = result.notes
        assert note.startswith("rank 1 has no value: its return value cannot be rebuilt in the caller")
        assert f"\n  {note}" in str(error)
        with pytest.raises(LookupError, match="rank 1 has no value: it had returned, but its value could not be pickled"):
            result[1]
