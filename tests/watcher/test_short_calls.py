"""Calls of a WorkerGroup that take so little time that every part of their way counts."""

import logging
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import mpwatch
from mpwatch import WorkerGroup
from support import failing, functions


@pytest.fixture
def group():
    """Two ranks that wait for a call."""
    with WorkerGroup(2, grace_period=5.0) as group:
        group.run(functions.rank)
        yield group


def print_and_raise(text):
    print(text, file=sys.stderr, flush=True)
    raise ValueError(text)


def sleep_and_return(seconds, value):
    time.sleep(seconds)
    return value


class Unloadable:
    """An object that cannot be rebuilt."""

    def __reduce__(self):
        return int, ("x",)


def return_unloadable_on_rank_1():
    return Unloadable() if functions.rank() == 1 else 5


def test_a_call_of_a_warm_group_costs_less_than_a_millisecond_of_the_program_s_time(group):
    used = time.process_time()
    for number in range(300):
        assert list(group.run(functions.double, [number])) == [2 * number] * 2
    assert time.process_time() - used < 0.3


def test_arguments_and_values_may_have_any_size(group):
    for size in (0, 1 << 10, 1 << 16, (1 << 22) + 1):
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        assert list(group.run(lambda data: 2 * data, [data])) == [2 * data] * 2
        assert list(group.run(len, [data])) == [size] * 2
        assert list(group.run(bytes, [size])) == [bytes(size)] * 2


def test_a_failure_has_the_stderr_of_its_call_alone(tmp_path):
    with WorkerGroup(1, logs=mpwatch.LogSpec(tmp_path)) as group:
        for text in ("first", "second"):
            with pytest.raises(mpwatch.RunFailedError) as caught:
                group.run(print_and_raise, [text])
            assert caught.value.root_cause.stderr == text


def test_a_value_that_cannot_be_rebuilt_is_a_failure(group):
    with pytest.raises(mpwatch.RunFailedError, match=r"Unloadable.*invalid literal"):
        group.run(return_unloadable_on_rank_1)
    assert list(group.run(functions.rank)) == [0, 1]


def test_threads_that_call_different_ranks_get_their_own_values():
    """The calls take between no time and a few milliseconds."""
    with WorkerGroup(3) as group, ThreadPoolExecutor(2) as threads:

        def call(*ranks):
            for number in range(100):
                result = group.run(sleep_and_return, [number % 7 / 2000, number], ranks=ranks, timeout=60)
                assert list(result.values()) == [number] * len(ranks)

        for done in [threads.submit(call, 0, 1), threads.submit(call, 2)]:
            done.result()
        assert [worker.restart_count for worker in group.run(mpwatch.current_worker)] == [0, 0, 0]


def test_a_signal_handler_may_ask_for_stacks_during_a_call(group):
    texts = []
    group.run(sleep_and_return, [0, 0])  # which imports this module
    before = signal.signal(signal.SIGALRM, lambda *_: texts.append(str(group.stacks())))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert list(group.run(sleep_and_return, [0.3, 5])) == [5, 5]
    finally:
        signal.signal(signal.SIGALRM, before)
    (text,) = texts
    assert "in sleep_and_return" in text
    assert "site-packages" not in text


def test_a_handler_that_takes_long_delays_no_other_call():
    """The handler waits until a call of another rank, in another thread, has exceeded its timeout."""
    has_timed_out = threading.Event()

    def call_rank_1(group):
        with pytest.raises(mpwatch.RunTimeoutError):
            group.run(failing.wait_to_be_stopped, ranks=[1], timeout=0.3)
        has_timed_out.set()

    with WorkerGroup(2, grace_period=0) as group, ThreadPoolExecutor(1) as threads:
        group.run(functions.rank)
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


def test_events_are_logged_as_soon_as_that_is_switched_on(group, caplog):
    caplog.set_level(logging.DEBUG, "mpwatch")
    group.run(functions.rank)
    assert sum("returned" in record.getMessage() for record in caplog.records) == 2
