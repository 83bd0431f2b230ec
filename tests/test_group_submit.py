"""Calls of some ranks of a WorkerGroup, and `WorkerGroup.submit`: what runs at the same time, and how a call is stopped."""

import functools
import os
import re
import signal
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest

import mpwatch
from mpwatch import PerRank, RunFailedError, WorkerGroup, WorkerState
from support import failing, functions
from support.process_state import SPAWN, is_alive
from support.programs import python


def meet_and_wait(barrier, event=None):
    """Wait for the event. Without one, sleep until the call is stopped."""
    barrier.wait(60)
    assert event.wait(60) if event else time.sleep(1000)
    return functions.rank()


@pytest.fixture
def group():
    with WorkerGroup(3) as group:
        yield group


def submit_waiting(group, ranks, event=None):
    barrier = SPAWN.Barrier(len(ranks) + 1)
    handle = group.submit(meet_and_wait, (barrier, event), ranks=ranks)
    barrier.wait(60)
    return handle


def test_some_ranks_are_called(group):
    result = group.run(functions.rank, ranks=[2, 0])
    assert dict(result.return_values) == {0: 0, 2: 2}
    assert [worker.rank for worker in result.workers] == [0, 2]
    assert list(group.run(functions.rank, ranks=np.int64(1)).values()) == [1]
    assert list(group.run(functions.rank, ranks=range(3))) == [0, 1, 2]
    assert (len(result), result[0], result[-1]) == (3, 0, 2)
    with pytest.raises(LookupError, match=r"rank 1 has no value: this call has not called it"):
        list(result)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (3, "ranks=3 has 3, but the ranks are 0 to 2"),
        ([0, -1], "ranks=[0, -1] has -1, but the ranks are 0 to 2"),
        ([], "ranks is empty; leave it out to call all ranks"),
        ("0", "ranks must be a rank or several ranks, such as 0 or [0, 2], not '0'"),
    ],
)
def test_ranks_that_do_not_exist(group, ranks, text):
    for method in (group.run, group.submit):
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(text)}$"):
            method(functions.rank, ranks=ranks)


def test_per_rank_has_a_value_for_each_rank_or_for_each_called_rank(group):
    assert group.run(str, (PerRank("abc"[rank] for rank in range(3)),), ranks=[2, 1]).return_values == {1: "b", 2: "c"}
    assert group.run(dict, kwargs={"x": PerRank([7, 8])}, ranks=[2, 1]).return_values == {1: {"x": 7}, 2: {"x": 8}}
    text = r"^args\[0\] is a PerRank of 1 value, but there are 3 ranks, of which 2 are called$"
    with pytest.raises(ValueError, match=text):
        group.run(str, (PerRank(["a"]),), ranks=[2, 1])


def test_calls_of_different_ranks_run_at_the_same_time(group):
    meet = functools.partial(meet_and_wait, SPAWN.Barrier(3), event := SPAWN.Event())
    event.set()
    first, second = group.submit(meet, ranks=0), group.submit(meet, ranks=2)
    assert group.run(meet, ranks=1)[1] == 1
    assert (first.result(60)[0], second.result(60)[2]) == (0, 2)
    assert list(group.run(functions.rank)) == [0, 1, 2]


def test_a_call_that_waits_can_be_cancelled(group):
    first = submit_waiting(group, [0])
    second, third = group.submit(functions.rank, ranks=[0, 1]), group.submit(functions.rank, ranks=[1, 2])
    notified = []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: notified.extend(wait([second], 60).done))
        assert second.cancel()
        waiting.result(60)
    assert notified == [second]
    assert second.cancel()
    assert list(third.result(60).values()) == [1, 2]
    assert not first.cancel()
    with pytest.raises(CancelledError):
        second.result(0)
    second.terminate()
    first.terminate()
    assert not first.cancel()


@pytest.fixture
def other(group):
    pids, event = list(group.run(os.getpid)), SPAWN.Event()
    handle = submit_waiting(group, [2], event)
    yield
    assert not handle.done()
    event.set()
    assert handle.result(60)[2] == 2
    assert list(group.run(os.getpid)) == pids


@pytest.mark.usefixtures("other")
def test_terminate_interrupts_one_call_and_its_ranks_stay(group):
    handle = submit_waiting(group, [0, 1])
    handle.terminate()
    with pytest.raises(RunFailedError, match=r"^the run was stopped: terminate\(\) was called"):
        handle.result(0)


@pytest.mark.usefixtures("other")
def test_ctrl_c_interrupts_only_the_call_of_the_main_thread(group):
    barrier = SPAWN.Barrier(2)
    threading.Thread(target=lambda: (barrier.wait(60), os.kill(os.getpid(), signal.SIGINT))).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            group.run(meet_and_wait, (barrier,), ranks=1)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_rank_that_dies_ends_the_other_calls(group, caplog):
    pids = list(group.run(os.getpid))
    other = submit_waiting(group, [2])
    with pytest.raises(RunFailedError) as caught:
        group.run(failing.is_killed, ranks=0)
    assert caught.value.root_cause.signal == signal.SIGKILL
    with pytest.raises(RunFailedError) as stopped:
        other.result(60)
    assert stopped.value.result.state is WorkerState.STOPPED
    assert str(stopped.value).startswith("the call was stopped together with rank 0, which it had not called")
    assert not any(map(is_alive, pids))
    handles = [group.submit(functions.rank, ranks=rank) for rank in range(3)]  # one of them restarts all ranks
    assert [handle.result(60)[rank] for rank, handle in enumerate(handles)] == [0, 1, 2]
    assert {worker.restart_count for worker in group.workers} == {1}
    (record,) = caplog.records
    assert record.message.startswith("all ranks are restarted: not all of them survived the last call: rank 0 ")


def test_close_cancels_calls_that_wait_and_lets_others_end():
    event, group = SPAWN.Event(), WorkerGroup(2)
    running = submit_waiting(group, [0], event)
    waiting = group.submit(functions.rank)
    waiting.add_done_callback(lambda _: event.set())
    group.close()
    assert waiting.cancelled()
    assert running.result(0)[0] == 0
    with pytest.raises(RuntimeError, match="this WorkerGroup is closed"):
        group.submit(functions.rank)


def test_a_block_that_raises_stops_the_calls():
    with pytest.raises(KeyboardInterrupt), WorkerGroup(2, timeout=20) as group:
        running, waiting = submit_waiting(group, [0]), group.submit(functions.rank)
        raise KeyboardInterrupt
    assert waiting.cancelled()
    with pytest.raises(RunFailedError, match=r"terminate\(\) was called"):
        running.result(0)


def test_the_timeout_begins_with_the_call(group):
    first = submit_waiting(group, [0])
    second = group.submit(functions.rank, ranks=0, timeout=60.0)
    assert not wait([second], 0.2).done
    first.terminate()
    assert second.result(60)[0] == 0
    with pytest.raises(mpwatch.RunTimeoutError, match=r"timeout=0\.2 s"):
        group.submit(time.sleep, (1000,), ranks=0, timeout=0.2).result(60)


def test_an_observer_cannot_call_its_own_group():
    errors = []

    def call_again(event):
        if event.name == "call_started" and not errors:
            for method in (lambda: group.run(functions.rank), group.close):
                with pytest.raises(RuntimeError, match="was called within a call of the same WorkerGroup") as caught:
                    method()
                errors.append(str(caught.value).partition(" ")[0])

    with WorkerGroup(1, on_event=call_again) as group:
        assert list(group.submit(functions.rank).result(60)) == [0]
    assert errors == ["run()", "close()"]


def test_a_done_callback_may_call_the_group(group):
    values, is_over = [], threading.Event()

    def call_again(handle):
        values.append(handle.result())
        values.append(group.run(functions.rank, ranks=0))
        values.append(group.submit(functions.rank).result(60))
        is_over.set()

    group.submit(functions.double, (3,), ranks=0).add_done_callback(call_again)
    assert is_over.wait(60)
    assert [list(result.values()) for result in values] == [[6], [0], [0, 1, 2]]


@pytest.mark.slow
def test_the_example_of_actors_and_a_learner():
    done = python(str(Path(__file__).parent.parent / "examples" / "actor_learner.py"))
    assert re.fullmatch(r"step (499|500): .*rank 2.*\nrestarts: 1\nchances of the arms: 0.00 0.00 1.00\n", done.stdout)
    assert done.stderr.startswith("all ranks are restarted: not all of them survived the last call: rank 2 was killed")
