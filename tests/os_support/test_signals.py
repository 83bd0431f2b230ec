"""Signals that are sent to one thread of a process."""

import os
import resource
import signal
import threading

from mpwatch.os_support.signals import send_signal_to_main_thread
from support.programs import in_own_process


@in_own_process
def test_the_main_thread_gets_the_signal_even_if_only_another_thread_can_take_it():
    """`os.kill` lets the kernel give it to the other thread."""
    has_started = threading.Event()

    def wait_in_a_thread():
        has_started.set()
        threading.Event().wait()

    taken = []
    signal.signal(signal.SIGUSR1, lambda number, _: taken.append(number))
    threading.Thread(target=wait_in_a_thread, daemon=True).start()
    has_started.wait()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    send_signal_to_main_thread(os.getpid(), signal.SIGUSR1)
    assert (signal.sigpending(), taken) == ({signal.SIGUSR1}, [])
    os.kill(os.getpid(), signal.SIGUSR1)
    while not taken:
        os.sched_yield()
    assert signal.sigpending() == {signal.SIGUSR1}


@in_own_process
def test_a_limit_of_pending_signals_does_not_stop_the_signal():
    """The kernel refuses a real-time signal of tgkill(2) at this limit, but not one of kill(2)."""
    taken = []
    signal.signal(signal.SIGRTMAX, lambda number, _: taken.append(number))
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 0))
    send_signal_to_main_thread(os.getpid(), signal.SIGRTMAX)
    assert taken == [signal.SIGRTMAX]
