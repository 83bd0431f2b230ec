"""`mpwatch.map`: items, values and failures, with real ranks."""

import copy
import gc
import itertools
import logging
import os
import pickle
import re
import signal
import threading
import time
from contextlib import suppress

import pytest

import mpwatch
from mpwatch import FailureKind, ItemFailedError, ItemFailure, LaunchError, RestartPolicy, RunFailedError
from mpwatch.events import WorkerExited
from support import failing
from support.programs import call, in_own_process


def fail_at_seven(number):
    if number == 7:
        raise ValueError("seven")
    return number


class BadValue:
    """It can be pickled, but not unpickled."""

    def __reduce__(self):
        return int, ("not a number",)


def test_values_come_in_the_order_of_the_items():
    assert list(mpwatch.map(abs, range(0, -300, -1), 3)) == list(range(300))
    assert list(mpwatch.map(abs, [-3], 3, progress=False)) == [3]
    assert list(mpwatch.map(abs, [], 2)) == []


def test_closures_and_large_items_and_values():
    offset, items = b"12345", [bytes([number]) * (1 << 20) for number in range(6)]
    assert list(mpwatch.map(lambda item: item + offset, items, 2)) == [item + offset for item in items]


def test_in_order_of_completion_a_slow_item_holds_up_only_its_own_value(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def wait_at_zero(number):
        if number == 100:
            gate.read_bytes()
        return number

    values = mpwatch.map(wait_at_zero, (number for number in range(100, 120)), 2, ordered=False)
    assert sorted(next(values) for _ in range(19)) == [(index, 100 + index) for index in range(1, 20)]
    gate.write_bytes(b"")
    assert list(values) == [(0, 100)]


def test_a_rank_keeps_its_state_from_item_to_item():
    def count_calls(_):
        worker = mpwatch.current_worker()
        count = worker.state["count"] = worker.state.get("count", 0) + 1
        return worker.rank, worker.world_size, count

    calls = list(mpwatch.map(count_calls, range(40), 2))
    by_rank = {rank: [count for each, _, count in calls if each == rank] for rank in (0, 1)}
    assert all(sorted(counts) == list(range(1, len(counts) + 1)) for counts in by_rank.values())
    assert {size for _, size, _ in calls} == {2}


def test_reports_reach_the_observers():
    seen = []
    list(mpwatch.map(lambda number: mpwatch.report(step=number), range(5), 2, on_progress=seen.append, chunksize=1))
    assert sorted(event.step for event in seen) == list(range(5))


def test_nothing_happens_before_the_first_next():
    items = iter([1])
    mpwatch.map(abs, items, 2).close()
    assert next(items) == 1


def test_no_more_of_endless_items_are_taken_than_the_buffer_has_room_for():
    taken = []
    items = (taken.append(number) or number for number in itertools.count())
    values = mpwatch.map(int, items, 2, buffersize=4)
    for expected in range(20):
        assert next(values) == expected
        assert len(taken) <= expected + 4 + 1
    del values  # nobody has the iterator any more: its ranks end
    gc.collect()


def test_the_first_failure_is_raised():
    with pytest.raises(ItemFailedError) as caught:
        list(mpwatch.map(fail_at_seven, range(100), 2))
    error = caught.value
    assert len(caught.traceback) <= 3  # this test and two frames of mpwatch
    assert repr(error.__cause__) == "ValueError('seven')"
    assert isinstance(error, RunFailedError)
    assert (error.item_failure.index, error.item_failure.item, error.item_failure.attempts) == (7, "7", 1)
    assert re.fullmatch(
        r"item number 7 \(7\) failed\nrank \d failed first: ValueError: seven \(test_map.py:.*\)", str(error)
    )
    assert repr(error) == f"ItemFailedError({str(error.item_failure)!r})"
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (back.item_failure.index, repr(back.__cause__), str(back)) == (7, "ValueError('seven')", str(error))


def test_a_failure_is_yielded_in_the_place_of_the_value():
    outcomes = list(mpwatch.map(fail_at_seven, range(20), 2, on_error="yield"))
    failure = outcomes.pop(7)
    assert outcomes == [number for number in range(20) if number != 7]
    assert isinstance(failure, ItemFailure)
    assert repr(failure.exception) == "ValueError('seven')"
    assert re.fullmatch(r"item number 7 \(7\) failed: rank \d: ValueError: seven \(test_map.py:.*\)", str(failure))


@pytest.mark.parametrize("chunksize", [None, 5])
def test_a_rank_that_dies_takes_one_item_with_it(chunksize, tmp_path):
    path = tmp_path / "calls"

    def append_line_and_die_at_seven(number):
        with path.open("a") as file:
            file.write(f"{number}\n")
        return failing.is_killed() if number == 7 else number

    outcomes = list(mpwatch.map(append_line_and_die_at_seven, range(30), 2, on_error="yield", chunksize=chunksize))
    failure = outcomes.pop(7)
    assert outcomes == [number for number in range(30) if number != 7]
    assert (failure.failure.kind, failure.failure.signal) == (FailureKind.SIGNAL, signal.SIGKILL)
    assert sorted(map(int, path.read_text().split())) == list(range(30))  # each item was called once


def test_a_failed_item_is_tried_again(tmp_path, caplog):
    def succeed_at_third_attempt(path):
        with path.open("a") as file:
            file.write("x")
        return "done" if path.stat().st_size == 3 else os._exit(3)

    paths = [tmp_path / str(number) for number in range(3)]
    assert list(mpwatch.map(succeed_at_third_attempt, paths, 2, max_restarts=2)) == ["done"] * 3
    texts = [text for text in caplog.messages if "tried again" in text]
    assert len(texts) == 6
    assert {text.partition("tried again ")[2][:16] for text in texts} == {"(attempt 2 of 3)", "(attempt 3 of 3)"}


def test_retry_if_decides_for_each_item():
    def fail_with(number):
        raise (FileNotFoundError if number == 0 else ValueError)("bad")

    policy = RestartPolicy(1, retry_if=OSError)
    first, second = mpwatch.map(fail_with, range(2), 1, on_error="yield", max_restarts=policy)
    assert [first.attempts, second.attempts] == [2, 1]
    assert str(first).endswith("(2 attempts); all restarts are used up (max_restarts=1)")
    assert "`retry_if` does not allow a restart" in str(second)


def test_an_item_that_takes_too_long():
    def hang_at_one(number):
        return failing.wait_in_a_thread() if number == 1 else number

    started_at = time.monotonic()
    outcomes = list(mpwatch.map(hang_at_one, range(10), 2, on_error="yield", heartbeat_timeout=0.5))
    failure = outcomes.pop(1)
    assert outcomes == [0, *range(2, 10)]
    assert failure.failure.kind is FailureKind.HANG
    assert "wait" in failure.failure.stack
    assert time.monotonic() - started_at < 30


def test_a_rank_without_items_is_not_late(caplog):
    values = mpwatch.map(int, range(10), 2, heartbeat_timeout=0.2, buffersize=1)
    assert next(values) == 0
    time.sleep(1)  # twice the time in which a late rank would be stopped
    assert list(values) == list(range(1, 10))
    assert not [text for text in caplog.messages if "restart" in text]


@pytest.mark.parametrize(
    ("make", "text"), [(threading.Lock, "cannot be sent back: it is of type _thread.lock"), (BadValue, "not a number")]
)
def test_a_value_that_cannot_be_sent_or_rebuilt_fails_alone(make, text):
    outcomes = list(mpwatch.map(lambda number: make() if number == 1 else number, range(5), 2, on_error="yield"))
    failure = outcomes.pop(1)
    assert outcomes == [0, 2, 3, 4]
    assert text in str(failure)
    assert failure.failure.elapsed > 0


@pytest.mark.parametrize("chunksize", [1, 3])
def test_an_item_that_cannot_be_pickled_is_named(chunksize):
    items = [0, 1, 2, 3, threading.Lock(), 5]
    text = r"items\[4\] is a _thread.lock, which cannot be sent"
    with pytest.raises(LaunchError, match=f"{text} to the ranks"):
        list(mpwatch.map(repr, items, 2, chunksize=chunksize))
    items[5] = BadValue()
    outcomes = list(mpwatch.map(repr, [*items, 6], 2, chunksize=chunksize, on_error="yield"))
    assert re.search(text, str(outcomes.pop(4)))
    assert "ValueError: invalid literal" in str(outcomes.pop(4))
    assert outcomes == ["0", "1", "2", "3", "6"]


def test_a_slow_iterator_does_not_hold_up_values():
    gate = threading.Event()

    def give():
        yield from range(1000)
        gate.wait(60)
        yield from range(3)

    values = mpwatch.map(abs, give(), 2)
    assert [next(values) for _ in range(500)] == list(range(500))
    gate.set()
    assert len(list(values)) == 503


@in_own_process
def test_a_second_ctrl_c_kills_the_ranks():
    def ignore_interrupts_unless_first(number):
        while number:
            with suppress(KeyboardInterrupt):
                time.sleep(1000)

    values = mpwatch.map(ignore_interrupts_unless_first, range(10), 2, grace_period=100)
    next(values)
    for seconds in (0.1, 1.0):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    started_at = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(values)
    assert time.monotonic() - started_at < 30


@in_own_process
def test_ctrl_c_while_an_item_waits_for_its_next_attempt():
    def interrupt(record):
        if "is tried again" in record.getMessage():
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return True

    logging.getLogger("mpwatch").addFilter(interrupt)
    started_at = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(mpwatch.map(fail_at_seven, [7], 1, max_restarts=RestartPolicy(1, delay=100)))
    assert time.monotonic() - started_at < 30


def test_a_rank_that_cannot_be_started_again_ends_the_map():
    def refuse(worker):
        if worker.restart_count:
            raise LookupError("no second start")
        return {}

    with pytest.raises(LookupError, match="no second start"):
        list(
            mpwatch.map(lambda number: number or failing.is_killed(), range(9), 2, env=refuse, on_error="yield", chunksize=1)
        )


def leave_an_iterator_behind():
    global values  # until the program has ended
    values = mpwatch.map(lambda number: number and time.sleep(1000), range(10), 2)
    print(next(values))


def test_a_program_ends_with_a_half_used_iterator():
    assert call(leave_an_iterator_behind).stdout == "0\n"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((3, []), {}, TypeError, "fn must be callable, not 3"),
        ((abs, 3), {}, TypeError, "items must be an iterable, not 3"),
        ((abs, []), {"on_error": "skip"}, ValueError, "on_error must be 'raise' or 'yield', not 'skip'"),
        ((abs, []), {"timeout": 3}, TypeError, r"map\(\) has no option 'timeout': use heartbeat_timeout"),
        ((abs, []), {"stop": (signal.SIGUSR1,)}, TypeError, r"map\(\) has no option 'stop': a map goes on"),
    ],
)
def test_bad_input_is_refused_before_a_rank_starts(arguments, options, error, text):
    with pytest.raises(error, match=text):
        mpwatch.map(*arguments, 2, **options)


class SlowlyDeleted:
    def __init__(self):
        self.made_in = os.getpid()

    def __del__(self):
        if os.getpid() != self.made_in:
            time.sleep(0.2)


def test_the_ranks_exit_by_themselves_after_the_last_value():
    """They do not get SIGTERM while they clean up after their last item."""
    seen = []
    assert list(mpwatch.map(type, [SlowlyDeleted(), SlowlyDeleted()], nprocs=2, on_event=seen.append))
    assert [event.was_stopped for event in seen if isinstance(event, WorkerExited)] == [False, False]
