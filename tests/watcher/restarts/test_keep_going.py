"""`keep_going`: a rank that has failed for good does not stop the others, and the values of those are kept."""

import logging
import pickle

import pytest

import mpwatch
from mpwatch import WorkerState
from mpwatch.events import Restarting, WorkerFailed, WorkerSucceeded
from support import failing
from support.process_state import SPAWN
from watcher.restarts import attempt_functions


def set_after(count, kind, event):
    """Return an observer that sets the event of multiprocessing when it has seen so many events of a kind."""
    left = [None] * count

    def observe(seen):
        if isinstance(seen, kind) and left:
            left.pop()
            if not left:
                event.set()

    return observe


def test_ranks_that_fail_do_not_stop_the_others(caplog):
    """The event is set when the caller has seen all failures, while the other ranks are running."""
    end = SPAWN.Event()
    with pytest.raises(mpwatch.RunFailedError) as caught, caplog.at_level(logging.WARNING):
        observe = set_after(2, WorkerFailed, end)
        mpwatch.run(attempt_functions.fails_on_odd_ranks, 4, args=(end,), keep_going=True, on_event=observe)
    error, result = caught.value, caught.value.result
    assert dict(result.return_values) == {0: 0, 2: 20}
    assert (list(result.values()), len(result), result[2], result[-2], result[:1]) == ([0, 20], 4, 20, 20, [0])
    assert set(result.failures) == {1, 3}
    assert str(error).startswith("2 of 4 ranks failed; ")
    assert isinstance(error.__cause__, ValueError) == (error.root_cause.rank == 1)
    assert "ranks 0, 2: had returned" in str(error)
    assert [result.worker_states[rank].name for rank in range(4)] == ["SUCCEEDED", "FAILED"] * 2
    assert len(caplog.messages) == 2
    assert all(text.endswith("no other rank is stopped, because of keep_going=True") for text in caplog.messages)
    with pytest.raises(LookupError, match=r"^rank 1 has no value: ValueError: bad shard") as missing:
        result[1]
    assert missing.value.__cause__ is result.failures[1].exception
    with pytest.raises(LookupError, match="rank 1 has no value"):
        list(result)


def test_each_rank_is_restarted_before_it_has_failed_for_good():
    end = SPAWN.Event()
    options = {"max_restarts": 1, "keep_going": True, "on_event": set_after(4, WorkerFailed, end), "check": False}
    result = mpwatch.run(attempt_functions.fails_on_odd_ranks, 4, args=(end,), **options)
    assert sorted(event.ranks for event in result.events if isinstance(event, Restarting)) == [(1,), (3,)]
    assert (result.state, result.restarts) == (WorkerState.FAILED, 2)
    assert dict(result.return_values) == {0: 0, 2: 20}


def test_all_ranks_may_fail():
    with pytest.raises(mpwatch.RunFailedError, match="2 of 2 ranks failed; ") as caught:
        mpwatch.run(failing.raises_value_error, 2, keep_going=True)
    assert (len(caught.value.result), dict(caught.value.result.items())) == (2, {})


def test_a_timeout_keeps_what_was_returned_by_then():
    result = mpwatch.run(attempt_functions.waits_on_rank_0, 2, keep_going=True, timeout=3.0, grace_period=0, check=False)
    assert dict(result.return_values) == {1: 1}
    assert result.reason == "the run did not end within timeout=3 s: rank 0 had not returned"


def test_a_failure_without_keep_going_keeps_the_values_that_were_returned_before_it():
    end = SPAWN.Event()
    fn, observe = attempt_functions.fails_when_the_others_have_returned, set_after(3, WorkerSucceeded, end)
    with pytest.raises(mpwatch.RunFailedError, match="rank 3 failed first: ValueError: bad shard") as caught:
        mpwatch.run(fn, 4, args=(end,), on_event=observe)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        result = error.result
        assert (list(result.return_values), result[0], result[2]()) == ([0, 2], None, 1)
        assert list(result.failures) == [3]
        (note,) = result.notes
        assert note.startswith("rank 1 has no value: its return value cannot be rebuilt in the caller")
        assert f"\n  {note}" in str(error)
        with pytest.raises(LookupError, match="rank 1 has no value: it had returned, but its value could not be pickled"):
            result[1]
