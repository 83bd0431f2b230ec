"""`keep_going`: a rank that has failed for good does not stop the others, and the values of those are kept."""

import logging
import os
import pickle
import signal
from dataclasses import replace

import pytest

import mpwatch
from mpwatch import RestartPolicy, WorkerState
from mpwatch.events import Restarting, WorkerFailed
from support import failing
from support.functions import rank as get_rank
from support.process_state import SPAWN


def fail_on_odd_ranks(end):
    """Ranks 1 and 3 fail, rank 5 is killed. The others go on until `end` is set, and return ten times their rank."""
    number = get_rank()
    if number in (1, 3):
        raise ValueError("bad shard")
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    assert end.wait(60)
    return 10 * number


def return_then_fail(fifo):
    """Rank 1 fails when all other ranks have returned and exited; rank 0 returns None."""
    number = get_rank()
    if number == 1:
        fifo.wait(60)
        raise ValueError("bad shard")
    return number or None


def wait_forever_on_rank_0():
    if get_rank() == 0:
        failing.wait_to_be_stopped()
    return get_rank()


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
    end = SPAWN.Event()
    with pytest.raises(mpwatch.RunFailedError) as caught, caplog.at_level(logging.WARNING):
        # the event is set when the caller has seen all failures, while the other ranks are running
        mpwatch.run(fail_on_odd_ranks, 6, args=(end,), keep_going=True, on_event=set_after(3, WorkerFailed, end))
    error, result = caught.value, caught.value.result
    assert dict(result.return_values) == {0: 0, 2: 20, 4: 40}
    assert list(result.values()) == [0, 20, 40]
    assert set(error.result.failures) == {1, 3, 5}
    first = error.root_cause
    assert str(error).startswith("3 of 6 ranks failed; ")
    assert isinstance(error.__cause__, ValueError) == (first.rank in (1, 3))
    assert "ranks 0, 2, 4: had returned" in str(error)
    assert {rank: state.name for rank, state in result.worker_states.items()} == {
        **dict.fromkeys((0, 2, 4), "SUCCEEDED"),
        **dict.fromkeys((1, 3, 5), "FAILED"),
    }
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 3
    assert all(text.endswith("no other rank is stopped, because of keep_going=True") for text in warnings)
    assert (len(result), result[4], result[-2], result[:1]) == (6, 40, 40, [0])
    with pytest.raises(LookupError, match=r"^rank 3 has no value: ValueError: bad shard") as missing:
        result[3]
    assert missing.value.__cause__ is result.failures[3].exception
    with pytest.raises(LookupError, match="rank 1 has no value"):
        list(result)


def test_each_rank_is_restarted_before_it_has_failed_for_good():
    end = SPAWN.Event()
    restarted = []

    def observe(event):
        if isinstance(event, Restarting):
            restarted.append(event.ranks)

    policy = RestartPolicy(2, delay=0.0)
    observers = [observe, set_after(9, WorkerFailed, end)]
    result = mpwatch.run(
        fail_on_odd_ranks, 6, args=(end,), max_restarts=policy, keep_going=True, on_event=observers, check=False
    )
    assert sorted(restarted) == [(1,), (1,), (3,), (3,), (5,), (5,)]
    assert (result.state, result.restarts) == (WorkerState.FAILED, 6)
    assert dict(result.return_values) == {0: 0, 2: 20, 4: 40}


def test_max_restarts_and_keep_going_restart_single_ranks():
    spec = mpwatch.WorkerSpec(fn=get_rank, nprocs=2, max_restarts=3, keep_going=True)
    assert spec.policy == RestartPolicy(3, scope="worker")
    assert replace(spec, keep_going=False).policy == RestartPolicy(3)


@pytest.mark.parametrize("keep_going", [True, False])
def test_a_timeout_keeps_what_was_returned_by_then(keep_going):
    result = mpwatch.run(wait_forever_on_rank_0, 3, keep_going=keep_going, timeout=6.0, grace_period=0, check=False)
    assert dict(result.return_values) == {1: 1, 2: 2}
    assert result.reason == "the run did not end within timeout=6 s: rank 0 had not returned"


def test_all_ranks_may_fail():
    with pytest.raises(mpwatch.RunFailedError, match="2 of 2 ranks failed; ") as caught:
        mpwatch.run(failing.raises_value_error, 2, keep_going=True)
    assert (len(caught.value.result), dict(caught.value.result.items())) == (2, {})


def test_a_run_without_failures_is_a_success():
    result = mpwatch.run(get_rank, 2, keep_going=True)
    assert (list(result), result.state) == ([0, 1], WorkerState.SUCCEEDED)


def test_ctrl_c_stops_all_ranks():
    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(failing.interrupts_its_watcher, 2, keep_going=True)


@pytest.mark.parametrize("options", [{}, {"max_restarts": RestartPolicy(0, scope="worker")}])
def test_values_that_were_returned_before_the_failure_are_kept_without_it(options):
    end = SPAWN.Event()
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(return_then_fail, 4, args=(end,), on_event=set_after(3, mpwatch.events.WorkerSucceeded, end), **options)
    result = caught.value.result
    assert dict(result.items()) == {0: None, 2: 2, 3: 3}
    assert (result[-1], result[2:], list(result.values())) == (3, [2, 3], [None, 2, 3])
    with pytest.raises(LookupError, match="rank 1 has no value: ValueError: bad shard"):
        list(result)


def test_a_call_that_fails_keeps_values_too():
    end = SPAWN.Event()
    with mpwatch.WorkerGroup(4, on_event=set_after(3, mpwatch.events.WorkerSucceeded, end), check=False) as group:
        assert dict(group.run(return_then_fail, [end]).items()) == {0: None, 2: 2, 3: 3}


def return_anything_then_fail(end):
    if get_rank() == 0:
        return CannotBeUnpickled()
    if get_rank() == 1:
        return lambda: 1  # which plain pickle refuses
    end.wait(60)
    raise ValueError("bad shard")


class CannotBeUnpickled:
    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise LookupError("not here")


def test_a_failure_arrives_whatever_the_values_are():
    end = SPAWN.Event()
    with pytest.raises(mpwatch.RunFailedError, match="rank 2 failed first: ValueError: bad shard") as caught:
        mpwatch.run(return_anything_then_fail, 3, args=(end,), on_event=set_after(2, mpwatch.events.WorkerSucceeded, end))
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        result = error.result
        assert (list(result.return_values), result[1]()) == ([1], 1)
        assert list(result.failures) == [2]
        (note,) = result.notes
        assert note.startswith("rank 0 has no value: its return value cannot be rebuilt in the caller")
        assert f"\n  {note}" in str(error)
        with pytest.raises(LookupError, match="rank 0 has no value: it had returned, but its value could not be pickled or rebuilt"):
            result[0]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"keep_going": 1}, TypeError, "keep_going must be True or False, not 1"),
        ({"keep_going": True, "backend": "gloo"}, ValueError, "backend='gloo' makes a process group, in which ranks wait"),
    ],
)
def test_options_that_do_not_fit(options, error, text):
    with pytest.raises(error, match=text):
        mpwatch.run(get_rank, 2, **options)
