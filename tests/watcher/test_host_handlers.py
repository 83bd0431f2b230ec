"""The host's own signal handlers during a run: handlers that raise, set other handlers, or log."""

import asyncio
import atexit
import gc
import logging
import os
import signal
import threading
import time
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

import pytest

import mpwatch
from support import failing, functions
from support.process_state import state
from support.programs import call, in_own_process
from watcher import alarm_functions

ALARMING = (alarm_functions.Alarms, alarm_functions.SwallowsTheException, alarm_functions.raises_alarms_error)


def raise_timeout(*_):
    raise TimeoutError("raised")


def check_raises(run, *args, **options):
    """Check that a run raises the exception of the handler, and leaves nothing."""
    before = state()
    with pytest.raises(TimeoutError, match=r"^raised$"):
        run(*args, **options)
    gc.collect()
    assert state() == before


def alarm_at_the_end(event):
    if event.name == "run_ended":
        alarm_functions.alarm()


@in_own_process
def test_an_exception_of_a_handler_stops_the_run_and_is_raised():
    def set_alarm_and_run(seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        mpwatch.run(failing.wait_to_be_stopped, 2)

    signal.signal(signal.SIGALRM, raise_timeout)
    mpwatch.run(functions.rank, 1)
    for n in range(1, 20):
        check_raises(set_alarm_and_run, n / 100)


@in_own_process
def test_an_exception_of_a_handler_comes_out_of_a_run_that_rebuilds_or_pickles():
    mpwatch.run(functions.rank, 1)
    signal.signal(signal.SIGALRM, raise_timeout)
    for fn in ALARMING:
        check_raises(mpwatch.run, fn, 1)
    check_raises(mpwatch.run, repr, 1, args=(alarm_functions.Alarms(),))
    check_raises(mpwatch.run, functions.rank, 1, on_event=alarm_at_the_end)


@in_own_process
def test_an_exception_of_a_handler_comes_out_of_a_call_and_the_ranks_stay_alive():
    signal.signal(signal.SIGALRM, raise_timeout)
    with mpwatch.WorkerGroup(1) as ranks:
        ranks.run(functions.rank)
        for fn in ALARMING:
            check_raises(ranks.run, fn)
        check_raises(ranks.run, repr, args=(alarm_functions.Alarms(),))
        assert (list(ranks.run(functions.rank)), ranks.workers[0].restart_count) == ([0], 0)


@in_own_process
def test_handlers_that_raise_again_and_again_leave_nothing():
    """From the second exception on, `run` may return before the ranks are dead."""
    left = 0

    def raise_again(*_):
        nonlocal left
        if left:
            left -= 1
            raise TimeoutError

    def set_timer(interval, event):
        if event.name == "call_started":
            signal.setitimer(signal.ITIMER_REAL, 0.01, interval)

    signal.signal(signal.SIGALRM, raise_again)
    resource_tracker.ensure_running()
    mpwatch.run(functions.rank, 1)
    before = state()
    for interval in (2e-5, 1e-4, 1e-3) * 3:
        left = 5
        with pytest.raises(TimeoutError):
            mpwatch.run(failing.wait_to_be_stopped, 1, grace_period=1, on_event=partial(set_timer, interval))
        left = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        deadline = time.monotonic() + 10
        while state() != before:
            assert time.monotonic() < deadline, (before, state())
            gc.collect()


@in_own_process
def test_a_handler_that_does_not_raise_does_not_disturb_the_run():
    start, end = (Connection(fd) for fd in os.pipe())
    threads = []

    def work(end):
        received = []
        signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
        end.send(os.getpid())
        os.kill(os.getppid(), signal.SIGUSR1)
        while not received:
            signal.sigtimedwait([], 0.01)
        return "received"

    def relay(*_):
        threads.append(threading.current_thread())
        os.kill(start.recv(), signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, relay)
    assert list(mpwatch.run(work, 1, args=(end,))) == ["received"]
    assert threads == [threading.main_thread()]


@in_own_process
def test_a_signal_during_a_run_reaches_the_event_loop_of_the_host():
    async def main():
        called = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, called.set)
        mpwatch.run(alarm_functions.send_sigusr1_to_watcher, 1)
        assert await asyncio.wait_for(called.wait(), 10)

    asyncio.run(main())


@in_own_process
def test_a_handler_that_the_host_sets_during_a_run_stays():
    signal.signal(signal.SIGUSR1, lambda *_: signal.signal(signal.SIGTERM, raise_timeout))
    mpwatch.run(alarm_functions.send_sigusr1_to_watcher, 1)
    assert signal.getsignal(signal.SIGTERM) is raise_timeout


@in_own_process
def test_warnings_are_logged_in_the_caller_s_thread():
    """A logging handler may need a lock that the caller holds."""
    lock, logged = threading.RLock(), []

    class Handler(logging.Handler):
        def emit(self, record):
            with lock:
                logged.append((threading.current_thread().name, record.getMessage()))

    logging.getLogger("mpwatch").addHandler(Handler())
    with lock:
        mpwatch.run(lambda: atexit.register(os._exit, 3) and None, 1)
    assert logged == [("MainThread", "rank 0 had returned, and then ended with exit code 3. Its value is kept")]


def interrupt_a_run_whose_rank_has_returned():
    def work():
        atexit.register(failing.wait_to_be_stopped)
        atexit.register(os.kill, os.getppid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(work, 1)


def test_a_stopped_run_does_not_log_the_signals_that_it_sent():
    assert call(interrupt_a_run_whose_rank_has_returned).stderr == ""


def run_after_the_main_thread():
    def late():
        threading.main_thread().join()
        print(list(mpwatch.run(functions.rank, 2)), flush=True)

    threading.Thread(target=late).start()


def test_a_run_may_begin_in_a_thread_that_outlives_the_main_thread():
    assert call(run_after_the_main_thread).stdout == "[0, 1]\n"
