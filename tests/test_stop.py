"""Ranks that are asked to save and return: `should_stop`, `request_stop` and the option `stop`."""

import itertools
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import mpwatch
import stop_functions
from mpwatch import WorkerGroup, WorkerState
from mpwatch.events import Restarting, Stopping, WorkerExited, WorkerReady, WorkerStarted
from stop_functions import STEPS
from support import failing, functions
from support.process_state import SPAWN, children, is_alive
from support.runs import at, failed
from support.thoroughness import choose

USR1 = (signal.SIGUSR1,)


@pytest.fixture
def received(monkeypatch):
    record = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: record.append(number))
    yield record
    signal.signal(signal.SIGUSR1, before)


def check_stopped(result, cause, ranks=2):
    assert result.state is WorkerState.SUCCEEDED
    assert list(result) == [result.stopped_at] * ranks
    assert 0 <= result.stopped_at < STEPS
    assert result.stop_cause == cause


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "SIGINT"), pytest.param(37, "signal 37", marks=pytest.mark.linux)],
)
def test_a_signal_stops_all_ranks_at_the_same_step(number, name):
    handler = signal.getsignal(number)
    events = []
    observers = (events.append, at(WorkerReady, partial(os.kill, os.getpid(), number), 2))
    result = mpwatch.run(stop_functions.count_steps, 2, stop=[number], on_event=observers)
    check_stopped(result, name)
    (stopping,) = (event for event in events if isinstance(event, Stopping))
    assert (stopping.stop_cause, stopping.ranks) == (name, (0, 1))
    assert stopping.after_step is None or stopping.after_step == result.stopped_at - 1
    assert signal.getsignal(number) is handler


@pytest.mark.parametrize(
    ("fn", "args", "options", "cause"),
    [
        (stop_functions.stop_itself, (1, 5), {}, "request_stop() in rank 1"),
        (stop_functions.count_steps, (), {"on_event": lambda event: mpwatch.request_stop()}, "request_stop()"),
        (stop_functions.count_steps, (), {"stop": mpwatch.StopPolicy(after=0.5)}, "StopPolicy(after=0.5)"),
    ],
    ids=["a rank", "an observer", "the end of the time"],
)
def test_what_stops_all_ranks(fn, args, options, cause):
    check_stopped(mpwatch.run(fn, 2, args=args, **options), cause)


def test_nobody_is_asked_if_nothing_runs():
    assert mpwatch.request_stop() is False
    assert mpwatch.should_stop(0) is False
    with WorkerGroup(1) as group:
        group.run(functions.rank)
        assert mpwatch.request_stop() is False
        assert group.run(mpwatch.should_stop, (3,))[0] is False


def test_a_handle_stops_its_own_ranks_only():
    with (
        mpwatch.submit(stop_functions.count_steps, 2) as first,
        mpwatch.submit(stop_functions.count_steps, 2) as second,
    ):
        first.request_stop()
        check_stopped(first.result(), "request_stop() of its handle")
        assert not second.done()
        assert mpwatch.request_stop()
        check_stopped(second.result(), "request_stop()")


def test_a_run_whose_thread_has_only_begun_is_asked():
    asked = threading.Event()
    handle = mpwatch.submit(stop_functions.count_steps, 2, env=lambda _: {"ASKED": str(asked.wait(60))})
    assert mpwatch.request_stop()
    asked.set()
    check_stopped(handle.result(60), "request_stop()")


def test_a_signal_to_all_processes_is_for_the_watcher_alone():
    """SLURM sends its warning to each process of a job step: to the interpreters that are starting, too."""
    others, signalled = children(), []

    def observe(event):
        if isinstance(event, WorkerStarted):
            os.kill(event.pid, signal.SIGUSR1)
        elif isinstance(event, WorkerReady):
            signalled[:] = children() - others
            for pid in signalled:
                os.kill(pid, signal.SIGUSR1)
            assert all(map(is_alive, signalled))

    result = mpwatch.run(stop_functions.count_steps, 2, stop=mpwatch.StopPolicy(USR1, after=1.0), on_event=observe)
    check_stopped(result, "StopPolicy(after=1)")
    assert len(signalled) == 3  # with the process that ends the ranks if this one is killed


def test_a_call_of_a_group_stops_and_the_next_one_runs(received):
    with WorkerGroup(2, stop=USR1) as group:
        handle = group.submit(stop_functions.count_steps)
        handle.request_stop()
        check_stopped(handle.result(), "request_stop() of its handle")
        handle.request_stop()  # too late
        result = group.run(stop_functions.count_steps, (5,))
        assert (list(result), result.stopped_at, result.stop_cause) == ([5] * 2, None, "")
        result = group.run(stop_functions.stop_itself, (0, 3))
        check_stopped(result, "request_stop() in rank 0")
        os.kill(os.getpid(), signal.SIGUSR1)  # between two calls it is the program's
        assert received == [signal.SIGUSR1]


@pytest.mark.parametrize("delay", [0.0, 600.0])
def test_independent_ranks_save_although_another_one_has_failed(delay):
    """With the delay, rank 0 waits for its restart when the stop is requested."""

    def fail_or_wait_for_stop():
        if functions.rank() == 0:
            raise OSError("the disk is full")
        step = stop_functions.count_steps(seconds=0.001)
        time.sleep(0.3)  # it takes time to save
        return step

    policy = mpwatch.RestartPolicy(1, scope="worker", delay=delay)
    error = failed(fail_or_wait_for_stop, 3, max_restarts=policy, on_event=at(WorkerExited, mpwatch.request_stop))
    assert "the disk is full" in str(error)
    states = {0: WorkerState.FAILED, 1: WorkerState.SUCCEEDED, 2: WorkerState.SUCCEEDED}
    assert (error.result.worker_states, error.result.stopped_at is not None) == (states, True)


def test_a_rank_that_never_asks_does_not_keep_the_others_waiting(barrier):
    def ask_on_rank_0(barrier):
        barrier.wait()
        return stop_functions.count_steps() if functions.rank() == 0 else None

    result = mpwatch.run(ask_on_rank_0, 3, args=(barrier,), stop=mpwatch.StopPolicy(after=0.5))
    assert result[0] == result.stopped_at
    assert list(result)[1:] == [None] * 2


@pytest.mark.parametrize("nprocs", [2])
def test_a_rank_that_has_returned_has_passed_its_last_step(barrier, nprocs):
    def end_early(barrier):
        asked = [mpwatch.should_stop(step) for step in range(7 if functions.rank() == 0 else 12)]
        barrier.wait()
        if functions.rank() == 1:
            return asked
        assert mpwatch.request_stop()
        return stop_functions.count_steps(first_step=7)

    result = mpwatch.run(end_early, nprocs, args=(barrier,))
    assert result[1] == [False] * 12
    assert result[0] == result.stopped_at >= 12


def test_ranks_in_different_epochs_stop_in_the_same_one():
    """Rank 0 requests a stop in its third epoch, when rank 1 is in its fourth. They go on when all have agreed on a step."""

    def train(barrier, agreed):
        for epoch, step in itertools.product(range(6), range(10)):
            if mpwatch.should_stop(step):
                return epoch, step
            if (epoch, step) == (2 + functions.rank(), 5):
                barrier.wait()
                assert functions.rank() == 1 or mpwatch.request_stop()
                assert agreed.wait(60)
        return None

    agreed = SPAWN.Event()
    result = mpwatch.run(train, 2, args=(SPAWN.Barrier(2), agreed), on_event=at(Stopping, agreed.set))
    assert list(result) == [(3, 6), (3, 6)]
    assert result.stopped_at == 6


@pytest.mark.parametrize(
    ("fail", "text"), [(failing.raises_value_error, "ValueError: the batch is bad"), (failing.is_killed, "SIGKILL")]
)
def test_a_failure_after_the_request_is_a_failure_without_restart(fail, text):
    error = failed(lambda: stop_functions.stop_itself() + (functions.rank() == 0 and fail()), 2, max_restarts=3)
    assert re.match(rf"rank 0 .*{text}", str(error))
    assert error.result.notes == ("not restarted: a stop was requested (request_stop() in rank 0)",)
    assert len(error.result.attempts) == 1


def test_ranks_that_were_restarted_stop():
    result = mpwatch.run(stop_functions.fail_first, 2, max_restarts=1)
    check_stopped(result, "request_stop() in rank 0")
    assert result.restarts == 1


def test_a_request_before_a_restart_is_the_end():
    policy = mpwatch.RestartPolicy(1, delay=600.0)
    observer = at(Restarting, partial(os.kill, os.getpid(), signal.SIGUSR1))
    error = failed(stop_functions.fail_first, 2, max_restarts=policy, stop=USR1, on_event=observer)
    assert "the first start" in str(error)
    assert error.result.notes == ("not restarted: a stop was requested (SIGUSR1)",)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGUSR1, mpwatch.RunFailedError), (signal.SIGINT, KeyboardInterrupt)])
def test_the_same_signal_again_does_at_once_what_it_does(number, error, received):
    arguments = {
        "args": (SPAWN.Event(), number),
        "stop": (number,),
        "on_event": at(Stopping, partial(os.kill, os.getpid(), number)),
    }
    with pytest.raises(error) as caught:
        mpwatch.run(stop_functions.hold_on, 2, **arguments, grace_period=60)
    if number == signal.SIGUSR1:
        assert "this process received SIGUSR1" in str(caught.value)
        assert caught.value.result.state is WorkerState.STOPPED
        assert received == [signal.SIGUSR1]


def test_a_signal_does_what_it_does_when_the_ranks_do_not_return_in_time(received, caplog):
    event = SPAWN.Event()
    policy = mpwatch.StopPolicy(USR1, timeout=0.1)
    error = failed(stop_functions.hold_on, 2, args=(event, signal.SIGUSR1), stop=policy, grace_period=60)
    text = "a stop was requested (SIGUSR1), and ranks 0-1 had not returned within StopPolicy(timeout=0.1)"
    assert text in str(error)
    assert error.result.state is WorkerState.STOPPED
    assert "hold_on" in error.result.stacks[0]
    assert received == [signal.SIGUSR1]
    # on a busy machine, only one rank may have come to the line that waits
    begin = r"ranks 0-1 had not returned within StopPolicy\(timeout=0\.1\)(, |: rank 0, )at step 0 in "
    assert re.match(begin + r"\w+ \(stop_functions\.py:\d+ in ", caplog.messages[-1])


@pytest.mark.parametrize(
    ("step", "error", "text"), [(1.5, TypeError, "as an int, not a float"), (1 << 64, ValueError, "64 bits")]
)
def test_a_step_is_an_int_of_64_bits(step, error, text):
    cause = failed(mpwatch.should_stop, 1, args=(step,)).__cause__
    assert isinstance(cause, error)
    assert text in str(cause)


def test_signals_need_the_main_thread():
    with pytest.raises(ValueError, match="the signals of stop= need a run in the main thread"):
        mpwatch.submit(functions.rank, 1, stop=USR1)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="the signals of stop= need a run in the main"):
        pool.submit(mpwatch.run, functions.rank, 1, stop=USR1).result()


@pytest.mark.parametrize("instants", [20, pytest.param(choose(200, 1000), marks=pytest.mark.slow)])
def test_ranks_stop_at_the_same_step_at_any_instant_and_no_signal_is_lost(received, instants):
    """The signal is in the result of a call, or the handler of the program gets it."""
    rng = random.Random(instants)
    with WorkerGroup(4, stop=USR1, timeout=60) as group:
        calls = stops = 0
        while stops < instants:
            timer = threading.Timer(rng.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            kwargs = {"steps": rng.choice([1, 300]), "seconds": rng.choice([1e-5, 1e-4, 1e-3])}
            result = group.run(stop_functions.count_steps, kwargs=kwargs)
            timer.join()
            assert set(result) == {kwargs["steps"] if result.stopped_at is None else result.stopped_at}
            stops += result.stop_cause == "SIGUSR1"
            calls += 1
            assert len(received) + stops == calls
