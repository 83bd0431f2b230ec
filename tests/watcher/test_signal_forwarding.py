"""`forward_signals`: which signals to the host program its ranks get."""

import faulthandler
import logging
import os
import signal
import threading
from multiprocessing import get_context

import pytest

import mpwatch
from mpwatch.watcher.direct_calls import DirectCalls
from support import functions
from support.programs import in_own_process
from watcher import forwarding_functions

USR2 = (signal.SIGUSR2,)
NOT_PASSED_ON = "SIGUSR2 was not passed on to {}: only a rank whose function has set a handler for the signal gets it"


class Sender:
    """Sends SIGUSR2 to this process when `nprocs` ranks are ready, and lets them go on. A context manager."""

    def __init__(self, nprocs):
        self.barrier = get_context("spawn").Barrier(nprocs + 1)
        self.thread = threading.Thread(target=self.send)

    def __enter__(self):
        self.thread.start()
        return self.barrier

    def __exit__(self, *_):
        self.thread.join()

    def send(self):
        self.barrier.wait()
        os.kill(os.getpid(), signal.SIGUSR2)
        self.barrier.wait()


def record_log():
    records = []

    class Handler(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    logging.getLogger("mpwatch").addHandler(Handler())
    return records


@in_own_process
def test_ranks_with_a_handler_get_the_signal_and_a_warning_names_the_others():
    records = record_log()
    with Sender(4) as barrier:
        args = (barrier, [0, 2])
        values = list(mpwatch.run(forwarding_functions.count_signals, 4, args=args, forward_signals=USR2))
    assert values == [1, 0, 1, 0]
    assert records == [NOT_PASSED_ON.format("ranks 1, 3")]
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@in_own_process
def test_the_ranks_of_a_call_get_the_signal():
    records = record_log()
    with mpwatch.WorkerGroup(3, forward_signals=USR2) as group:
        for ranks in (None, [1, 2]):
            with Sender(3 if ranks is None else 2) as barrier:
                values = list(group.run(forwarding_functions.count_signals, (barrier, [0, 1, 2]), ranks=ranks).values())
            assert values == [1] * (3 if ranks is None else 2)
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert records == []


@in_own_process
def test_a_handler_of_the_host_is_called_too():
    threads = []
    signal.signal(signal.SIGUSR2, lambda *_: threads.append(threading.current_thread()))
    handler = signal.getsignal(signal.SIGUSR2)
    with Sender(1) as barrier:
        args = (barrier, [0])
        assert list(mpwatch.run(forwarding_functions.count_signals, 1, args=args, forward_signals=USR2)) == [1]
    assert threads == [threading.main_thread()]
    assert signal.getsignal(signal.SIGUSR2) is handler


@in_own_process
def test_a_host_that_ignores_the_signal_still_ignores_it_after_the_run():
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with Sender(1) as barrier:
        args = (barrier, [0])
        assert list(mpwatch.run(forwarding_functions.count_signals, 1, args=args, forward_signals=USR2)) == [1]
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


@in_own_process
def test_the_processes_that_a_rank_has_started_do_not_get_the_signal():
    with Sender(1) as barrier:
        assert list(mpwatch.run(forwarding_functions.keep_helper, 1, args=(barrier,), forward_signals=USR2)) == [True]


@in_own_process
def test_signals_are_taken_over_from_the_start_of_a_call():
    """The caller's own thread makes no call, since that leaves the signals to the host."""
    with mpwatch.WorkerGroup(1, forward_signals=USR2) as group:
        group.run(functions.rank)
        DirectCalls.execute = None
        assert list(group.run(functions.rank)) == [0]


@in_own_process
def test_a_signal_before_the_ranks_run_their_function_is_passed_to_none():
    records = record_log()

    def send(event):
        if event.name == "worker_started":
            os.kill(os.getpid(), signal.SIGUSR2)

    assert list(mpwatch.run(functions.rank, 1, forward_signals=USR2, on_event=send)) == [0]
    assert records == []


def test_only_the_main_thread_can_forward_signals():
    caught = []

    def run_in_thread():
        with pytest.raises(ValueError, match="forward_signals needs a run in the main thread, because Python") as error:
            mpwatch.run(functions.rank, 1, forward_signals=USR2)
        caught.append(error)

    thread = threading.Thread(target=run_in_thread)
    thread.start()
    thread.join()
    assert len(caught) == 1
    with pytest.raises(ValueError, match="forward_signals needs a run in the main thread"):
        mpwatch.submit(functions.rank, 1, forward_signals=USR2)
    with pytest.raises(TypeError, match=r"forward_signals.*the calls of map are not made in the main thread"):
        mpwatch.map(functions.double, [1], 1, forward_signals=USR2)


def test_a_call_of_another_thread_leaves_the_signals_alone():
    with mpwatch.WorkerGroup(1, forward_signals=USR2) as group:
        assert list(group.submit(functions.rank).result()) == [0]


@in_own_process
def test_a_signal_that_c_code_handles_is_refused():
    text = r"forward_signals may not have SIGUSR2 now: C code of this program handles it, .*; unregister it, or"
    with mpwatch.WorkerGroup(1, forward_signals=USR2) as group:
        faulthandler.register(signal.SIGUSR2)
        with pytest.raises(ValueError, match=text):
            mpwatch.run(functions.rank, 1, forward_signals=USR2)
        with pytest.raises(ValueError, match=text):
            group.run(functions.rank)
        faulthandler.unregister(signal.SIGUSR2)
        assert (list(group.run(functions.rank)), group.workers[0].restart_count) == ([0], 0)
