"""Calls that the caller's own thread makes, and what passes them on to the watcher thread."""

import os
import select
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

import mpwatch
from mpwatch import WorkerGroup, WorkerState
from mpwatch.watcher import direct_calls, run
from support import failing, functions


@pytest.fixture
def patient(monkeypatch):
    """Let the caller's thread keep a call until something happens."""
    monkeypatch.setattr(run, "QUICK_CALL_SECONDS", 60.0)


@pytest.fixture
def group():
    """Two ranks that wait for a call."""
    with WorkerGroup(2, grace_period=5.0) as group:
        group.run(functions.rank)
        yield group


def count_waits_of_watcher_thread():
    """Return how often the watcher thread has waited for an event."""
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "mpwatch")
    with open(f"/proc/self/task/{thread.native_id}/status") as lines:
        return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])


def call_until_the_watcher_thread_sleeps(call):
    """Repeat a call until the watcher thread has ended its work for earlier ones. Return its number of waits."""
    for _ in range(1000):
        before = count_waits_of_watcher_thread()
        call()
        if count_waits_of_watcher_thread() == before:
            return before
    raise AssertionError("the watcher thread wakes up at each call")


def report_step(step):
    if step is not None:
        mpwatch.report(step=step)


def print_and_raise(text):
    print(text, file=sys.stderr, flush=True)
    raise ValueError(text)


def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.001)
    return path


def send_interrupt_to_caller(path):
    """Rank 0 interrupts the caller when both ranks are in the function."""
    open(f"{path}{functions.rank()}", "x").close()
    wait_for_file(f"{path}{1 - functions.rank()}")
    if functions.rank() == 0:
        os.kill(os.getppid(), signal.SIGINT)
    failing.wait_to_be_stopped()


class Unloadable:
    """An object that cannot be rebuilt."""

    def __reduce__(self):
        return int, ("x",)


def make_unloadable():
    return Unloadable()


def test_the_watcher_thread_does_not_wake_up_for_short_calls(group, patient):
    before = call_until_the_watcher_thread_sleeps(lambda: group.run(functions.rank))
    for number in range(100):
        result = group.run(functions.double, [number])
        assert list(result) == [2 * number] * 2
    assert count_waits_of_watcher_thread() == before
    assert result.state is WorkerState.SUCCEEDED
    assert result.worker_states == {0: WorkerState.SUCCEEDED, 1: WorkerState.SUCCEEDED}
    assert result.workers == group.workers


def test_calls_of_some_ranks_are_short_too(patient):
    with WorkerGroup(3) as group:
        group.run(functions.rank)
        before = call_until_the_watcher_thread_sleeps(lambda: group.run(functions.rank, ranks=[0, 2]))
        for _ in range(10):
            assert dict(group.run(functions.rank, ranks=[0, 2]).return_values) == {0: 0, 2: 2}
        assert count_waits_of_watcher_thread() == before
        assert list(group.run(functions.rank)) == [0, 1, 2]


@pytest.mark.parametrize("size", [0, 1 << 10, direct_calls.READ_SIZE, 1 << 16, 1 << 22])
def test_arguments_and_return_values_of_any_size(group, patient, size):
    array = np.arange(size, dtype=np.uint8)
    for result in group.run(functions.double, [array]):
        np.testing.assert_array_equal(result, 2 * array)
    assert list(group.run(len, [bytes(size)])) == [size] * 2
    assert list(group.run(bytes, [size])) == [bytes(size)] * 2


def test_a_report_belongs_to_one_call(group, patient):
    assert {rank: progress.step for rank, progress in group.run(report_step, [5]).progress.items()} == {0: 5, 1: 5}
    assert group.run(report_step, [None]).progress == {}


def test_a_failure_has_the_stderr_of_its_call_alone(tmp_path):
    with WorkerGroup(1, logs=mpwatch.LogSpec(tmp_path)) as group:
        for text in ("first", "second", "third"):
            with pytest.raises(mpwatch.RunFailedError) as caught:
                group.run(print_and_raise, [text])
            assert caught.value.root_cause.stderr == text
            assert list(group.run(functions.rank)) == [0]


def test_a_value_that_cannot_be_rebuilt_is_a_failure(group, patient):
    with pytest.raises(mpwatch.RunFailedError, match=r"Unloadable.*invalid literal"):
        group.run(make_unloadable)
    assert list(group.run(functions.rank)) == [0, 1]


def test_an_exception_of_a_rank(group, patient):
    for _ in range(2):
        with pytest.raises(mpwatch.RunFailedError, match=r"rank \d failed first: ValueError") as caught:
            group.run(failing.raises_value_error)
        assert isinstance(caught.value.__cause__, ValueError)
        assert list(group.run(functions.rank)) == [0, 1]


def test_the_death_of_a_rank_ends_the_call_at_once(group, patient):
    with pytest.raises(mpwatch.RunFailedError, match="killed by SIGKILL") as caught:
        group.run(failing.is_killed)
    assert caught.value.root_cause.kind is mpwatch.FailureKind.SIGNAL
    assert [worker.restart_count for worker in group.run(mpwatch.current_worker)] == [1, 1]


def test_a_rank_that_died_before_the_call_is_restarted(group, patient):
    for restarts in range(1, 4):
        pid = group.run(os.getpid)[1]
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([pidfd], [], [])
        os.close(pidfd)
        assert [worker.restart_count for worker in group.run(mpwatch.current_worker)] == [restarts] * 2


def test_the_timeout_of_a_call(group, patient):
    with pytest.raises(mpwatch.RunTimeoutError, match=r"timeout=0\.01 s"):
        group.run(time.sleep, [60], timeout=0.01)
    assert list(group.run(functions.rank)) == [0, 1]


def test_a_longer_call_is_passed_to_the_watcher_thread(group):
    for _ in range(20):
        assert list(group.run(time.sleep, [2 * run.QUICK_CALL_SECONDS])) == [None, None]
        assert list(group.run(functions.rank)) == [0, 1]


def test_ctrl_c_interrupts_the_ranks(group, patient, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        group.run(send_interrupt_to_caller, [str(tmp_path / "x")])
    assert [worker.restart_count for worker in group.run(mpwatch.current_worker)] == [0, 0]


def test_stacks_of_a_call_that_the_callers_thread_waits_for(group, patient, tmp_path):
    path = str(tmp_path / "go")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(group.run, wait_for_file, [path])
        while "wait_for_file" not in str(group.stacks()):
            assert not call.done()
        open(path, "x").close()
        assert list(call.result()) == [path] * 2


def test_calls_of_different_ranks_at_the_same_time(patient):
    with WorkerGroup(3) as group, ThreadPoolExecutor(3) as threads:

        def call(rank):
            for number in range(100):
                assert group.run(functions.double, [number], ranks=rank)[rank] == 2 * number

        for done in [threads.submit(call, rank) for rank in range(3)]:
            done.result()
        assert list(group.run(functions.rank)) == [0, 1, 2]


def test_close_while_a_thread_waits_for_a_call(patient):
    with ThreadPoolExecutor(1) as threads:
        group = WorkerGroup(1)
        group.run(functions.rank)
        call = threads.submit(group.run, time.sleep, [0.05])
        group.close()
        with suppress(RuntimeError):  # closed before the call began
            assert list(call.result()) == [None]


def test_an_observer_of_calls_sees_each_of_them():
    names = []
    with WorkerGroup(1, on_event=lambda event: names.append(event.name)) as group:
        for _ in range(3):
            group.run(functions.rank)
    assert names.count("call_started") == names.count("worker_succeeded") == 3
