"""A program: throws an exception into mpwatch at one of its bytecodes after another, and says where that left something.

    python anywhere.py WHAT FIRST STRIDE       WHAT: run (of a function), or group (made, called
                                               twice, closed); or printing, with output that is captured

Only the caller's thread is thrown at, as Python does it. A bytecode without a line is left out: CPython itself keeps the
frame for ever if a tracer raises there.
"""

import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing import resource_tracker

import functions

import mpwatch
from mpwatch.os_support.processes import await_end_of_thread

PACKAGE = os.path.dirname(mpwatch.__file__)
EVENT = "line" if sys.version_info[:2] == (3, 12) else "opcode"  # which that version does not trace


class ThrownError(BaseException):
    """From nowhere, as far as mpwatch can tell."""


class Thrower:
    """Counts bytecodes, and throws at one of them."""

    def __init__(self, at):
        self.at = at
        self.count = 0

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter(self, frame, *_):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = EVENT == "opcode", EVENT == "line"
        return self._step

    def _step(self, frame, event, _):
        if event == EVENT:
            self.count += 1
            if self.count == self.at and frame.f_lineno is not None:
                sys.settrace(None)
                raise ThrownError(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        return self._step


def state():
    descriptors = {}
    for entry in os.listdir("/proc/self/fd"):
        if os.path.exists(path := f"/proc/self/fd/{entry}"):
            descriptors[entry] = os.readlink(path)
    tasks = os.listdir("/proc/self/task")
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    return {
        "descriptors": descriptors,
        "threads": (threading.active_count(), len(tasks)),
        "children": [open(f"/proc/self/task/{task}/children").read() for task in tasks],
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "wake-up descriptor": wakeup_fd,
        "environment": dict(os.environ),
    }


def run():
    mpwatch.run(functions.rank, 1)


def printing():
    mpwatch.run(functions.rank, 1, logs=mpwatch.LogSpec())
    group(logs=mpwatch.LogSpec())


def group(**options):
    try:
        with mpwatch.WorkerGroup(1, **options) as ranks:
            ranks.run(functions.rank)
            ranks.run(functions.rank)
    except RuntimeError as error:  # it struck as a lock was about to be released, where Python itself throws nothing
        raise error.__context__ from None


def throw(what, at):
    """Where it was thrown, or None if it was not."""
    with Thrower(at):
        try:
            what()
        except ThrownError as thrown:
            return str(thrown)
        except mpwatch.RunFailedError as error:  # it struck while a value was rebuilt, and nobody can tell it from that
            return str(error.__cause__) if isinstance(error.__cause__, ThrownError) else None
    return None


def await_forgotten():
    """A group that was being made, or closed, may be left to the garbage collector; its ranks end by themselves then."""
    collect()
    for thread in threading.enumerate():
        if thread.name.startswith("mpwatch"):
            thread.join(10.0)
            await_end_of_thread(thread.native_id, 10.0)
    collect()  # what the threads had


def collect():
    with suppress(BufferError):  # CPython may stumble over views of views that are garbage together
        gc.collect()


def main(what, first, stride):
    resource_tracker.ensure_running()
    what()
    with Thrower(0) as counter:
        what()
    thrown, before = 0, state()
    for at in range(first, counter.count, stride):
        where = throw(what, at)
        thrown += where is not None
        await_forgotten()
        after = state()
        for name in before:
            if before[name] != after[name]:
                print(f"bytecode {at}, {where}: {name}: {before[name]} -> {after[name]}")
        before = after
    print(f"thrown {thrown} times at {counter.count} bytecodes")


if __name__ == "__main__":
    main({"run": run, "group": group, "printing": printing}[sys.argv[1]], *map(int, sys.argv[2:]))
