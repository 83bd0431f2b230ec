"""Calls that the caller's own thread makes, and what passes them on to the watcher thread."""

import logging
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
from mpwatch.watcher import pending_call, run
from support import failing, functions


@pytest.fixture
def patient(monkeypatch):
    """Let the caller's thread keep a call for a long time."""
    monkeypatch.setattr(run, "QUICK_CALL_SECONDS", 1.0)


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


def return_late_on_rank_1(seconds, value):
    if functions.rank() == 1:
        time.sleep(seconds)
    return value


class CountedLoad:
    """An object that counts how often it is rebuilt."""

    loads = 0

    def __reduce__(self):
        return count_load, ()


def count_load():
    CountedLoad.loads += 1
    return CountedLoad()


def return_counted_or_unloadable():
    return CountedLoad() if functions.rank() == 0 else Unloadable()


def change_main(text):
    before = sys.modules["__main__"].__doc__
    sys.modules["__main__"].__doc__ = text
    return before


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
    assert count_waits_of_watcher_thread() < before + 50  # it looks from time to time whether there are calls
    assert result.state is WorkerState.SUCCEEDED
    assert result.worker_states == {0: WorkerState.SUCCEEDED, 1: WorkerState.SUCCEEDED}
    assert result.workers == group.workers


def test_calls_of_some_ranks_are_short_too(patient):
    with WorkerGroup(3) as group:
        group.run(functions.rank)
        before = call_until_the_watcher_thread_sleeps(lambda: group.run(functions.rank, ranks=[0, 2]))
        for _ in range(100):
            assert dict(group.run(functions.rank, ranks=[0, 2]).return_values) == {0: 0, 2: 2}
        assert count_waits_of_watcher_thread() < before + 50
        assert list(group.run(functions.rank)) == [0, 1, 2]


@pytest.mark.parametrize("size", [0, 1 << 10, pending_call.READ_SIZE, 1 << 16, 1 << 22])
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


def test_a_call_that_has_begun_keeps_its_answers_when_other_ranks_are_called():
    """The other thread's calls begin while a call waits to be taken over: rank 0 has answered it, and rank 1 has not."""
    is_over = threading.Event()

    def call_rank_2(group):
        while not is_over.is_set():
            assert group.run(functions.rank, ranks=[2])[2] == 2

    with WorkerGroup(3) as group, ThreadPoolExecutor(1) as threads:
        group.run(functions.rank)
        other = threads.submit(call_rank_2, group)
        try:
            for number in range(300):
                result = group.run(return_late_on_rank_1, [0.0018, number], ranks=[0, 1], timeout=30)
                assert list(result.values()) == [number, number]
        finally:
            is_over.set()
        other.result()
        assert [worker.restart_count for worker in group.run(mpwatch.current_worker)] == [0, 0, 0]


def test_a_signal_handler_may_ask_for_stacks_during_a_call(group, patient):
    texts = []
    before = signal.signal(signal.SIGALRM, lambda *_: texts.append(str(group.stacks())))
    try:
        for _ in range(5):
            group.run(functions.rank)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            assert list(group.run(time.sleep, [0.1])) == [None, None]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(texts) == 5
    assert all("mpwatch" not in text and "rank" in text for text in texts)


def test_a_handler_that_takes_long_delays_no_other_call(patient):
    """The handler waits until a call of another rank, in another thread, has exceeded its timeout."""
    has_timed_out = threading.Event()

    def call_rank_1(group):
        with pytest.raises(mpwatch.RunTimeoutError):
            group.run(failing.wait_to_be_stopped, ranks=[1], timeout=0.3)
        has_timed_out.set()

    with WorkerGroup(2, grace_period=0) as group, ThreadPoolExecutor(1) as threads:
        group.run(functions.rank)
        group.run(functions.rank, ranks=[0])
        before = signal.signal(signal.SIGALRM, lambda *_: has_timed_out.wait(60))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            other = threads.submit(call_rank_1, group)
            with suppress(mpwatch.RunFailedError):  # the ranks are stopped together
                group.run(time.sleep, [60], ranks=[0], timeout=60)
            assert has_timed_out.is_set()
            other.result()
        finally:
            signal.signal(signal.SIGALRM, before)


def test_what_the_interpreter_has_printed_comes_first(capfd):
    with WorkerGroup(1, env={"PYTHONWARNINGS": "nonsense"}) as group:
        group.run(print, ["first"])
        group.run(print, ["second"])
    assert "Invalid -W option ignored: invalid action: 'nonsense'" in capfd.readouterr().err


def test_events_are_logged_as_soon_as_that_is_switched_on(group, caplog):
    for _ in range(5):
        group.run(functions.rank)
    caplog.set_level(logging.DEBUG, "mpwatch")
    group.run(functions.rank)
    texts = [record.getMessage() for record in caplog.records]
    assert sum("returned" in text for text in texts) == 2


def test_a_value_is_rebuilt_once_even_if_another_one_cannot_be(group, patient):
    CountedLoad.loads = 0
    with pytest.raises(mpwatch.RunFailedError, match="Unloadable"):
        group.run(return_counted_or_unloadable)
    assert CountedLoad.loads == 1


def test_each_call_describes_the_main_module_again(group, patient):
    texts = {text for _ in range(3) for text in group.run(change_main, ["changed"])}
    assert texts == {sys.modules["__main__"].__doc__}


def test_the_watcher_thread_reads_the_channels_of_idle_ranks_after_a_while(group, eventually):
    direct = group._ranks._watcher_thread.direct_calls
    group.run(functions.rank)
    eventually(lambda: not direct.are_offered)
    assert list(group.run(functions.rank)) == [0, 1]
