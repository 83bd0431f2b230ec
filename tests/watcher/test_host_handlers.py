"""The host's own signal handlers during a run: handlers that raise, set other handlers, fork or log."""

import asyncio
import atexit
import faulthandler
import gc
import itertools
import logging
import os
import signal
import threading
from functools import partial
from multiprocessing.connection import Connection

import pytest

import mpwatch
from mpwatch.watcher import watcher_thread
from support import failing, functions
from support.programs import call, in_own_process
from support.signal_at_line import SignalAtLine
from watcher import alarm_functions

ALARMING = (alarm_functions.Alarms, alarm_functions.SwallowsTheException, alarm_functions.raises_alarms_error)


def assert_unchanged(before):
    after = state()
    assert after == before, f"before {before}\nafter {after}"


def state():
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return handlers, descriptor, threading.active_count(), os.listdir("/proc/self/fd")


def raise_timeout(*_):
    raise TimeoutError("raised")


def check_raises(run, *args, **options):
    """Check that a run raises the exception of the handler, and leaves nothing."""
    before = state()
    with pytest.raises(TimeoutError, match=r"^raised$"):
        run(*args, **options)
    assert_unchanged(before)


@in_own_process
def test_an_exception_of_a_handler_stops_the_run_and_is_raised():
    def set_alarm_and_run(seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        mpwatch.run(failing.wait_to_be_stopped, 2)

    signal.signal(signal.SIGALRM, raise_timeout)
    mpwatch.run(functions.rank, 1)
    for n in range(1, 20):
        check_raises(set_alarm_and_run, n / 100)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ((), ("accelerators.py", "cgroups.py", "read_process_state", "_is_open", "reserve_port", "CommandQueue.__init__")),
        ((), ("HostSignals.restore", "find_signals_without_handler")),
        (("cannot be pickled",), ("run_until_handler_raises", "_HandlerWatch.replace", "_HandlerWatch.restore")),
    ],
)
@in_own_process
def test_an_alarm_is_raised_wherever_it_comes(args, names):
    """TimeoutError is an OSError, which mpwatch handles in many places while it prepares a run."""
    refused = (threading.Lock(),)  # cannot be pickled
    signal.signal(signal.SIGALRM, raise_timeout)
    mpwatch.run(functions.rank, 1)
    with pytest.raises(mpwatch.LaunchError):
        mpwatch.run(id, 1, args=refused)
    before = state()
    for name in names:
        n, alarm = 0, None
        while alarm is None or alarm.was_sent:
            n += 1
            outcome = "returned"
            with SignalAtLine(signal.SIGALRM, name, n) as alarm:
                try:
                    mpwatch.run(id if args else functions.rank, 1, args=args and refused)
                except BaseException as error:
                    outcome = repr(error)
            if alarm.was_sent:
                assert (outcome, state()) == ("TimeoutError('raised')", before), f"{name}, line {n}: {outcome}"
        assert n > 1, f"{name} has no lines"


@in_own_process
def test_an_exception_of_a_handler_comes_out_of_a_run_that_rebuilds_or_pickles():
    mpwatch.run(functions.rank, 1)
    signal.signal(signal.SIGALRM, raise_timeout)
    for fn in ALARMING:
        check_raises(mpwatch.run, fn, 1)
    check_raises(mpwatch.run, repr, 1, args=(alarm_functions.Alarms(),))
    check_raises(mpwatch.run, functions.rank, 1, on_event=alarm_at_the_end)


def alarm_at_the_end(event):
    if event.name == "run_ended":
        alarm_functions.alarm()


@in_own_process
def test_an_exception_of_a_handler_comes_out_of_a_call_that_rebuilds_or_pickles():
    """The ranks stay alive."""
    signal.signal(signal.SIGALRM, raise_timeout)
    ranks = mpwatch.WorkerGroup(1, on_event=alarm_at_the_end)
    ranks.run(functions.rank)
    for fn in ALARMING:
        check_raises(ranks.run, fn)
    check_raises(ranks.run, repr, args=(alarm_functions.Alarms(),))
    assert (list(ranks.run(functions.rank)), ranks.workers[0].restart_count) == ([0], 0)
    with pytest.raises(TimeoutError, match=r"^raised$"):
        ranks.close()


@in_own_process
def test_one_ctrl_c_ends_the_rebuilding_of_a_value():
    def raise_my_own(*_):
        raise BlockingIOError("mine")

    for handler, kind in [(signal.default_int_handler, KeyboardInterrupt), (raise_my_own, BlockingIOError)]:
        signal.signal(signal.SIGINT, handler)
        with pytest.raises(kind) as caught:
            mpwatch.run(alarm_functions.Endless, 1)
        assert caught.value.__cause__ is None


@in_own_process
def test_many_handlers_that_raise_in_a_row_leave_nothing():
    """They begin to raise when a rank is started, or when the function is called."""
    left = 0

    def raise_again(*_):
        nonlocal left
        if left:
            left -= 1
            raise TimeoutError

    def set_timer(name, interval, event):
        if event.name == name:
            signal.setitimer(signal.ITIMER_REAL, 0.01, interval)

    signal.signal(signal.SIGALRM, raise_again)
    mpwatch.run(functions.rank, 1)
    before = state()
    for name, interval in itertools.product(["worker_started", "call_started"] * 3, [2e-5, 1e-4, 1e-3]):
        left = 5
        try:
            mpwatch.run(failing.wait_to_be_stopped, 1, grace_period=1, on_event=partial(set_timer, name, interval))
        except TimeoutError:
            pass
        finally:
            left = 0
            signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()
        assert_unchanged(before)


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


@pytest.mark.parametrize("when", ["before", "during"])
@in_own_process
def test_a_host_may_close_its_wake_up_descriptor(when):
    _, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGUSR1, lambda *_: os.close(write))
    if when == "before":
        os.close(write)
    assert list(mpwatch.run(alarm_functions.send_sigusr1_to_watcher if when == "during" else (lambda: 1), 1)) == [1]
    signal.set_wakeup_fd(-1)


@in_own_process
def test_a_signal_at_the_end_of_a_run_reaches_the_host_s_event_loop():
    def at_the_end(*arguments, wait=watcher_thread.wait_for_thread_exit):
        wait(*arguments)
        os.kill(os.getpid(), signal.SIGUSR1)

    async def main():
        called = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, called.set)
        mpwatch.run(functions.rank, 1)
        assert await asyncio.wait_for(called.wait(), 10)

    watcher_thread.wait_for_thread_exit = at_the_end
    asyncio.run(main())


def handle_sigterm_in_c():
    faulthandler.register(signal.SIGTERM, chain=False)
    mpwatch.run(functions.rank, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here")


def test_signals_that_c_code_handles_are_left_alone():
    done = call(handle_sigterm_in_c)
    assert done.stdout == "still here\n"
    assert "most recent call first" in done.stderr


@in_own_process
def test_a_handler_that_the_host_sets_during_a_run_stays():
    signal.signal(signal.SIGUSR1, lambda *_: signal.signal(signal.SIGTERM, raise_timeout))
    mpwatch.run(alarm_functions.send_sigusr1_to_watcher, 1)
    assert signal.getsignal(signal.SIGTERM) is raise_timeout


@in_own_process
def test_a_child_forked_by_a_handler_does_not_wait_for_the_ranks():
    parent, pids = os.getpid(), []
    signal.signal(signal.SIGUSR1, lambda *_: pids.append(os.fork()))
    try:
        values = list(mpwatch.run(alarm_functions.send_sigusr1_to_watcher, 1))
    except RuntimeError as error:
        os._exit(7 if os.getpid() != parent and "forked" in str(error) else 8)
    assert (values, os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])) == ([1], 7)


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
