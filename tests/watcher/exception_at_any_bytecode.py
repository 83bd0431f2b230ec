"""A program: raises an exception at one bytecode of mpwatch after another, and prints where that leaked something.

    python exception_at_any_bytecode.py WHAT FIRST STRIDE

WHAT is `run` (one run), `submit` (a run in a thread), or `group` (create a group, call it in all ways, close it).

The exception is raised only in the caller's thread, and only where Python itself calls signal handlers: at the begin of a
function, after a call, and when a loop goes back. Bytecodes without a line are left out: CPython never releases the frame if a
tracer raises there.
"""

import dis
import gc
import os
import signal
import sys
import time
from contextlib import suppress
from functools import cache
from multiprocessing import resource_tracker

import mpwatch
from support import failing, functions
from support.process_state import difference, state

PACKAGE = os.path.dirname(mpwatch.__file__)
EVENT = "line" if sys.version_info[:2] == (3, 12) else "opcode"  # which that version does not trace


class ThrownError(BaseException):
    """The exception that is raised. mpwatch does not know it."""


@cache
def find_places(code):
    """Return the offsets of the bytecodes at which a signal handler may raise.

    Python calls the handler at the end of a call, with the exception handlers of the call. So the next bytecode is a place only
    if it has the same ones: not at the end of a `with` or `try` block.
    """
    bytecode = dis.Bytecode(code)
    places, before = set(), None
    for instruction in bytecode:
        follows = before is not None and find_target(bytecode, before) == find_target(bytecode, instruction)
        if follows and (before.opname.startswith("CALL") or EVENT == "line"):
            places.add(instruction.offset)
        if instruction.opname in ("RESUME", "JUMP_BACKWARD"):
            places.add(instruction.offset)
        before = instruction
    return places


def find_target(bytecode, instruction):
    found = (entry.target for entry in bytecode.exception_entries if entry.start <= instruction.offset < entry.end)
    return next(found, None)


class Thrower:
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
        if event == EVENT and frame.f_lasti in find_places(frame.f_code):
            self.count += 1
            if self.count == self.at and frame.f_lineno is not None:
                sys.settrace(None)
                raise ThrownError(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        return self._step


def run():
    mpwatch.run(functions.rank, 1)


def submit():
    with mpwatch.submit(functions.rank, 1) as handle:
        handle.result()


def call_group():
    with mpwatch.WorkerGroup(2) as ranks:
        ranks.run(functions.rank)
        try:
            waiting = [ranks.submit(functions.rank, ranks=rank) for rank in (0, 1, 1)]
            assert list(ranks.run(functions.double, [1])) == [2, 2]
            waiting[-1].result()
            with suppress(mpwatch.RunFailedError):
                ranks.run(failing.raises_value_error)
            ranks.submit(functions.rank).cancel()
            ranks.submit(functions.rank).terminate()
        except ThrownError:
            sys.settrace(None)
            assert list(ranks.run(functions.double, [1000])) == [2000, 2000]
            raise


def throw_at(what, at):
    with Thrower(at):
        try:
            what()
        except ThrownError as thrown:
            return str(thrown)
        except mpwatch.RunFailedError as error:  # raised while a value was unpickled: mpwatch reports a failure of that
            reason = error.__cause__ and error.__cause__.__cause__
            return str(reason) if isinstance(reason, ThrownError) else None
    return None


def settle(before, seconds):
    """Return the state of this process, as soon as it is as before, or after so many seconds.

    The garbage collector deletes a group that was not fully created or closed, and then its ranks exit.
    """
    deadline = time.monotonic() + seconds
    while True:
        with suppress(BufferError):  # CPython can raise it for views of views that are collected together
            gc.collect()
        after = state()
        if after == before or time.monotonic() > deadline:
            return after
        signal.sigtimedwait([], 0.01)


def main(what, first, stride):
    resource_tracker.ensure_running()
    what()
    with Thrower(0) as counter:
        what()
    thrown, before = 0, settle(None, 1)
    gc.freeze()  # what is here stays: a collection of all of it would take longer than the run
    for at in range(first, counter.count, stride):
        where = throw_at(what, at)
        thrown += where is not None
        after = settle(before, 0 if what is run else 10)  # a run has left nothing when it raises
        for name in before:
            if before[name] != after[name]:
                print(f"place {at}, {where}: {name}: {difference(before[name], after[name])}")
        before = after
    print(f"thrown {thrown} times at {counter.count} places")


if __name__ == "__main__":
    main({"run": run, "submit": submit, "group": call_group}[sys.argv[1]], *map(int, sys.argv[2:]))
