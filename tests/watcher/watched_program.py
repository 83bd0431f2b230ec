"""A program with a run, for tests that send signals to its processes. A rank imports this module, so it imports little."""

import functools
import os
import signal
import sys
import threading  # noqa: F401 - for the statements

import mpwatch
from support import failing

RUN = "mpwatch.run(work, 2, grace_period=5)"
PATIENT_RUN = "mpwatch.run(work, 2, grace_period=60)"


def main(call, in_rank, in_host):
    """Execute the statement `in_host`, then `call`. The ranks of `call` execute the statement `in_rank`."""
    global work
    work = functools.partial(wait_with_helper, in_rank)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    exec(in_host, globals())
    exec(call, globals())


def start_helper(statements):
    helper = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", statements], os.environ)
    os.write(1, f"running {os.getpid()} {helper}\n".encode())


def wait_with_helper(in_rank):
    exec(in_rank, globals())
    start_helper("import signal; signal.pause()")
    failing.wait_to_be_stopped()


def spin(gate):
    start_helper("while True: pass")
    while not os.path.exists(gate):
        mpwatch.report(step=3)
    return mpwatch.current_worker().rank, mpwatch.current_worker().restart_count


def call_in_thread(call=RUN):
    try:
        exec(call, globals())
    except KeyboardInterrupt:
        os.write(1, b"interrupted\n")


def executor():
    from concurrent.futures import ThreadPoolExecutor  # the time of its first import matters

    return ThreadPoolExecutor()
