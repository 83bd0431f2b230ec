"""The registry of live calls, which `mpwatch.request_stop` asks to stop, and which end with the program.

    main thread   script ------------> wait for other threads ------------> atexit functions --> end
                    |                   ^                                    _end_runs
                    '---- Ctrl-C -------'
                          _interrupt_after_script

Ctrl-C raises KeyboardInterrupt in the main thread only. If it ends the script, the calls of other threads are interrupted,
too. Python waits for no daemon threads, such as those of `mpwatch.submit`, and not on after a Ctrl-C. So the runs that are
left are ended by a function of `atexit`. After that, group_ranks.py ends the ranks of WorkerGroups.
"""

import atexit
import os
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import cache
from typing import Protocol
from weakref import WeakValueDictionary

from mpwatch.os_support.cpython_private import call_before_joining_threads
from mpwatch.os_support.processes import wait_for_thread_exit

CALLER_SECONDS = 1.0  # how long the thread of a run may go on after the run is over


class LiveCall(Protocol):
    """A CallOfThread, or a RunHandle of `mpwatch.submit`, since the thread of the run has its CallOfThread only later."""

    def _ask_to_stop(self, cause: str) -> bool:
        """Ask the ranks to save and return. Return False if the call is over."""


class CallOfThread(ABC):
    """A run, or a call of a WorkerGroup, for which this thread waits."""

    def __init__(self, *, is_run: bool) -> None:
        self.is_run = is_run
        self.is_in_main_thread = threading.current_thread() is threading.main_thread()
        self.thread_id = threading.get_native_id()
        self.is_over = threading.Event()

    @abstractmethod
    def _ask_to_stop(self, cause: str) -> bool: ...

    @abstractmethod
    def interrupt(self) -> None:
        """Do what Ctrl-C does in the main thread."""

    @abstractmethod
    def end_with_program(self) -> None:
        """Stop the ranks, since the program is ending."""


_calls: WeakValueDictionary[tuple[int, int], LiveCall] = WeakValueDictionary()  # by the pid of their process and their id
_is_interrupted = False  # Ctrl-C has ended the script
_has_ended = False


def add_call(call: LiveCall) -> None:
    _calls[os.getpid(), id(call)] = call
    if isinstance(call, CallOfThread) and not call.is_in_main_thread:
        prepare()
        if _is_interrupted:
            call.interrupt()
        elif _has_ended and call.is_run:
            call.end_with_program()


def request_stop(cause: str) -> bool:
    """Ask the ranks of all live calls to stop. Return whether at least one accepts the request.

    It is safe to call this function in a signal handler.
    """
    answers = [call._ask_to_stop(cause) for call in _list_calls()]
    return any(answers)


@cache
def prepare() -> None:
    """Call this before a thread that makes a call is started, since it does nothing once the program has begun to end."""
    # At the end, Python calls the function last that was registered first. concurrent.futures.thread waits there for all
    # ThreadPoolExecutors, so it has to be registered before. It can be imported only until the end begins.
    with suppress(RuntimeError):
        import concurrent.futures.thread  # noqa: F401

    atexit.register(_end_runs)
    call_before_joining_threads(_interrupt_after_script)


def _interrupt_after_script() -> None:
    """Python calls this before it waits for other threads. An interactive session does not end with Ctrl-C."""
    global _is_interrupted
    if not hasattr(sys, "ps1") and isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        _is_interrupted = True  # first, so that a call that begins now is interrupted, too
        for call in _list_calls_of_threads():
            call.interrupt()


def _end_runs() -> None:
    """End the runs of other threads, unless they were interrupted, and wait for them."""
    global _has_ended
    _has_ended = True
    for run in _list_runs_of_threads() if not _is_interrupted else ():
        run.end_with_program()
    while runs := _list_runs_of_threads():
        runs[0].is_over.wait()
        wait_for_thread_exit(runs[0].thread_id, CALLER_SECONDS)


def _list_runs_of_threads() -> list[CallOfThread]:
    return [call for call in _list_calls_of_threads() if call.is_run]


def _list_calls_of_threads() -> list[CallOfThread]:
    calls = [call for call in _list_calls() if isinstance(call, CallOfThread)]
    return [call for call in calls if not (call.is_in_main_thread or call.is_over.is_set())]


def _list_calls() -> list[LiveCall]:
    """In a fork, `_calls` also has those of the parent process."""
    references = [reference for reference in _calls.valuerefs() if reference.key[0] == os.getpid()]
    return [call for reference in references if (call := reference()) is not None]
