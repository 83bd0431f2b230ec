"""The signal handlers and logging handlers of the calling program during a run."""

import asyncio
import atexit
import gc
import logging
import os
import signal
import threading

import pytest

import mpwatch
from support import failing, functions
from support.process_state import state
from support.programs import call, in_own_process


def raise_timeout(*_):
    raise TimeoutError("raised")


@in_own_process
def test_an_exception_of_a_handler_stops_the_run_and_is_raised():
    """If it strikes while the call is pickled, the error says that the call cannot be sent because of it. If it strikes in
    CPython's `Thread.start`, that raises a KeyError in its place.
    """
    signal.signal(signal.SIGALRM, raise_timeout)
    mpwatch.run(functions.rank, 1)
    before = state()
    for n in range(1, 20):
        signal.setitimer(signal.ITIMER_REAL, n / 100, 5.0)  # again, if an `except OSError` has swallowed the first one
        with pytest.raises((TimeoutError, mpwatch.LaunchError, KeyError), match=r"raised$|^<Thread\(mpwatch"):
            mpwatch.run(failing.wait_to_be_stopped, 2)
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()
        assert state() == before


@in_own_process
def test_an_exception_of_a_handler_in_an_observer_is_not_taken_for_the_observer_s():
    class UrgentError(BaseException):
        pass

    def raise_urgent(*_):
        raise UrgentError

    signal.signal(signal.SIGUSR1, raise_urgent)
    signals = [signal.SIGUSR1]
    with pytest.raises(UrgentError):
        mpwatch.run(failing.wait_to_be_stopped, 2, on_event=lambda _: signals and signal.raise_signal(signals.pop()))


@in_own_process
def test_a_signal_during_a_run_reaches_the_event_loop_of_the_host():
    async def main():
        called = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, called.set)
        mpwatch.run(lambda: os.kill(os.getppid(), signal.SIGUSR1), 1)
        assert await asyncio.wait_for(called.wait(), 10)

    asyncio.run(main())


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


def run_after_the_main_thread():
    def late():
        threading.main_thread().join()
        print(list(mpwatch.run(functions.rank, 2)), flush=True)

    threading.Thread(target=late).start()


def test_a_run_may_begin_in_a_thread_that_outlives_the_main_thread():
    assert call(run_after_the_main_thread).stdout == "[0, 1]\n"
