"""The host program of one history. It calls `run`, prints a report as a dictionary in one line, and exits.

    python host.py FOLDER READY     FOLDER has the history. The program writes a byte to descriptor READY just before the call.

The report also has each part of the process state that the run has changed. There should be none.
"""

import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker

import mpwatch
from chaos.board import CALLED, ENDED, TIMER_FIRED, record_time, run_rank
from chaos.histories import Fault
from support import process_state

mpwatch.run  # imported before the state is read: in Python 3.12 the import of `typing` adds to copyreg


class TimerError(Exception):
    """Raised by the handler of the program's own timer."""


def main(folder, ready):
    with open(f"{folder}/history", "rb") as file:
        history = pickle.load(file)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGUSR1)  # the harness sends it if this program hangs
    if history.fault is Fault.TERMINATE_HANDLED:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if history.fault is Fault.TIMER:
        signal.signal(signal.SIGALRM, lambda *_: raise_timer_error(folder))
    call = call_in_thread if history.fault is Fault.IN_A_THREAD else call_run
    resource_tracker.ensure_running()  # it lives until the program ends
    before = read_process_state()
    os.write(ready, b"x")
    try:
        try:
            if history.fault is Fault.TIMER:
                signal.setitimer(signal.ITIMER_REAL, history.fault_at + 1e-6)
            record_time(folder, CALLED)
            result = call(history, folder)
        finally:
            record_time(folder, ENDED)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        outcome = {"outcome": type(error).__name__, "chain": exception_chain(error), "text": str(error)[:2000]}
        print_report(before, {**outcome, **describe_run_failure(error)})
        raise
    print_report(before, {"outcome": "returned", "values": list(result), "states": describe_states(result)})


def call_run(history, folder):
    restarts, delay = 0, history.restart_delay
    if history.restart_scope:
        restarts = mpwatch.RestartPolicy(10_000, scope=history.restart_scope, delay=delay, max_delay=delay)
    options = {"grace_period": history.grace_period, "max_restarts": restarts}
    return mpwatch.run(run_rank, len(history.plans), args=(history, folder), **options)


def call_in_thread(history, folder):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call_run, history, folder).result()


def raise_timer_error(folder):
    record_time(folder, TIMER_FIRED)
    raise TimerError


def exception_chain(error):
    names = []
    while error is not None:
        names.append(type(error).__name__)
        error = error.__cause__
    return names


def describe_run_failure(error):
    """Describe the RunFailedError of a run. It may be the cause of the exception that a signal raised."""
    failed = error if isinstance(error, mpwatch.RunFailedError) else error.__cause__
    if not isinstance(failed, mpwatch.RunFailedError):
        return {}
    return {
        "root": failed.root_cause and failed.root_cause.rank,
        "verdict": str(failed).splitlines()[0],
        "exit_code": failed.exit_code,
        "chain_length": len(exception_chain(failed.__cause__)),
        "failures": {rank: describe_failure(failure) for rank, failure in failed.result.failures.items()},
        "states": describe_states(failed.result),
    }


def describe_failure(failure):
    exception = "" if failure.exception is None else type(failure.exception).__name__
    known = {"kind": failure.kind.name, "exit_code": failure.exit_code, "is_secondary": failure.is_secondary}
    return {**known, "exception": exception}


def describe_states(result):
    return {rank: state.name for rank, state in result.worker_states.items()}


def print_report(before, report):
    after = read_process_state()
    changed = {name: (repr(before[name]), repr(after[name])) for name in before if before[name] != after[name]}
    print({**report, "changed": changed}, flush=True)


def read_process_state():
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    return {**process_state.state(), "wake-up descriptor": wakeup_fd, "active children": multiprocessing.active_children()}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
