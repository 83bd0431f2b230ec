"""Ends the calls of other threads than the main one when the program ends.

Ctrl-C raises KeyboardInterrupt in the main thread only. At the end of the script Python waits for all threads that are no
daemons. So there are two moments at which Ctrl-C can end a program while another thread waits for a call:

    main thread   script ------------> wait for other threads -----------------> atexit functions --> end
                    |                   ^                    |                     ^
                    '-- Ctrl-C ---------'                    '-- Ctrl-C -----------'
                        _interrupt_after_script                  _interrupt_and_wait

Python does not wait for daemon threads, so `_interrupt_and_wait` ends their runs at the end of every program. After that,
group_ranks.py ends the ranks of WorkerGroups.
"""

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from functools import cache
from typing import Protocol
from weakref import WeakValueDictionary

from mpwatch.os_support.cpython_private import call_before_joining_threads, exit_by_sigint
from mpwatch.os_support.processes import wait_for_thread_exit

CALLER_SECONDS = 1.0  # how long the caller's thread may take to handle its KeyboardInterrupt


class CallOfThread(Protocol):
    thread_id: int
    pid: int
    is_over: threading.Event
    ends_with_program: bool

    def interrupt(self) -> None:
        """Do what Ctrl-C does in the main thread."""

    def end_with_program(self) -> None:
        """Stop the ranks: the program does not wait for the thread of this call."""


_calls: WeakValueDictionary[int, CallOfThread] = WeakValueDictionary()
_is_interrupted = False
_has_ended = False


def add_call(call: CallOfThread) -> None:
    prepare()
    _calls[id(call)] = call
    if _is_interrupted:
        call.interrupt()
    elif _has_ended and call.ends_with_program:
        call.end_with_program()


def remove_call(call: CallOfThread) -> None:
    _calls.pop(id(call), None)
    call.is_over.set()


@cache
def prepare() -> None:
    """Call this before a thread that makes a call is started, since it does nothing once the program has begun to end."""
    # At the end, Python calls the function last that was registered first. concurrent.futures.thread waits there for all
    # ThreadPoolExecutors, so it has to be registered before. It can be imported only until the end begins.
    with suppress(RuntimeError):
        import concurrent.futures.thread  # noqa: F401

    atexit.register(_interrupt_and_wait)
    call_before_joining_threads(_interrupt_after_script)


def _interrupt_after_script() -> None:
    """Python calls this before it waits for other threads. An interactive session does not end with Ctrl-C."""
    if not hasattr(sys, "ps1") and isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        _interrupt_calls()


def _interrupt_and_wait() -> None:
    """Interrupt all calls if Ctrl-C has ended Python's wait for other threads: one that is no daemon still runs then.

    Else end the runs of daemon threads. In both cases, wait for these calls.
    """
    other_threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    global _has_ended
    _has_ended = True
    is_interrupted = bool(_list_calls()) and not all(thread.daemon for thread in other_threads)
    if is_interrupted:
        _interrupt_calls()
    else:
        for call in _list_calls(only_ending=True):
            call.end_with_program()
    while calls := _list_calls(only_ending=not is_interrupted):
        calls[0].is_over.wait()
        # not `join`: before Python 3.13, it returns at once if Ctrl-C has ended another `join` of that thread
        wait_for_thread_exit(calls[0].thread_id, CALLER_SECONDS)
    if is_interrupted and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        exit_by_sigint()


def _interrupt_calls() -> None:
    global _is_interrupted
    _is_interrupted = True  # first, so that a call that begins now is interrupted, too
    for call in _list_calls():
        call.interrupt()


def _list_calls(*, only_ending: bool = False) -> list[CallOfThread]:
    """Return the running calls. In a fork, `_calls` also has those of the parent process."""
    calls = [call for reference in _calls.valuerefs() if (call := reference()) is not None]
    return [call for call in calls if call.pid == os.getpid() and (call.ends_with_program or not only_ending)]
