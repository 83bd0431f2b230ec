"""The program of one history: calls `run`, says as a line of JSON what came of it, and ends as any program does.

    python host.py FOLDER GO     the history is in the folder; a byte is written to descriptor GO just before the call

It also says what of its own state the run has changed, which is to be nothing.
"""

import copyreg
import faulthandler
import json
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
from multiprocessing import resource_tracker
from pathlib import Path

from acts import live
from board import ALARM, BEGAN, ENDED, Board
from histories import Blow

import mpwatch.api  # with all that it imports: in Python 3.12 `typing` itself adds to copyreg


class AlarmError(Exception):
    """Of the program's own timer."""


def main(folder, go):
    with open(f"{folder}/history", "rb") as file:
        history = pickle.load(file)
    board = Board(folder, len(history.parts))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGUSR1)  # whoever finds that this hangs asks where
    if history.blow is Blow.TERMINATE_HANDLED:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if history.blow is Blow.ALARM:
        signal.signal(signal.SIGALRM, lambda *_: sound(board))
    call = call_in_thread if history.blow is Blow.IN_A_THREAD else call_run
    before = state()
    os.write(go, b"x")
    try:
        try:
            if history.blow is Blow.ALARM:
                signal.setitimer(signal.ITIMER_REAL, history.strike.at + 1e-6)
            board.write(BEGAN)
            result = call(history, folder)
        finally:
            board.write(ENDED)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        outcome = {"outcome": type(error).__name__, "chain": chain_of(error), "text": str(error)[:2000]}
        say(before, {**outcome, **failure_of(error)})
        raise
    say(before, {"outcome": "returned", "values": list(result), "states": states_of(result)})


def call_run(history, folder):
    policy = None
    if history.restarted:
        policy = mpwatch.RestartPolicy(10_000, scope=history.restarted, delay=history.pause, max_delay=history.pause)
    return mpwatch.run(
        live,
        len(history.parts),
        args=(history, folder),
        grace_period=history.grace_period,
        restart_policy=policy,
    )


def call_in_thread(history, folder):
    outcome = []

    def call():
        try:
            outcome.append(call_run(history, folder))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def sound(board):
    board.write(ALARM)
    raise AlarmError


def chain_of(error):
    """Its type, and those of its causes."""
    names = []
    while error is not None:
        names.append(type(error).__name__)
        error = error.__cause__
    return names


def failure_of(error):
    """What a failed run says, even if it is only what a signal was raised from."""
    failed = error if isinstance(error, mpwatch.RunFailedError) else error.__cause__
    if not isinstance(failed, mpwatch.RunFailedError):
        return {}
    root = failed.root_cause
    return {
        "root": root and root.rank,
        "verdict": str(failed).splitlines()[0],
        "exit_code": failed.exit_code,
        "links": len(chain_of(failed.__cause__)),
        "failures": {rank: told(failure) for rank, failure in failed.failures.items()},
        "states": states_of(failed.result),
    }


def told(failure):
    exception = "" if failure.exception is None else type(failure.exception).__name__
    return {
        "kind": failure.kind.name,
        "exit_code": failure.exit_code,
        "exception": exception,
        "is_secondary": failure.is_secondary,
    }


def states_of(result):
    return {rank: state.name for rank, state in result.worker_states.items()}


def say(before, what):
    after = state()
    changed = {name: [repr(before[name]), repr(after[name])] for name in before if before[name] != after[name]}
    print(json.dumps({**what, "changed": changed}), flush=True)


def state():
    """Of this process, all that a run could leave changed. multiprocessing's resource tracker may stay."""
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    tracker = resource_tracker._resource_tracker
    return {
        "children": children() - {tracker._pid},
        "descriptors": descriptors(but=tracker._fd),
        "threads": [thread.name for thread in threading.enumerate()],
        "shared memory": {name for name in os.listdir("/dev/shm") if "mpwatch" in name and not name.startswith("sem.mp")},
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "wake-up descriptor": wakeup_fd,
        "environment": dict(os.environ),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "active children": multiprocessing.active_children(),
        "copyreg": dict(copyreg.dispatch_table),
        "folder": os.getcwd(),
    }


def children():
    """Zombies among them, from the kernel itself."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def descriptors(but):
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the one of the listing itself
            continue
    found.pop(but, None)
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
