"""A node of a job, in a process of its own: `python -m nodes.node FILES HOSTNAME`, with the pickled call in its stdin.

It writes the outcome of the call, and what the call has left in this process, to FILES.outcome.
"""

import ctypes
import gc
import pickle
import platform
import signal
import socket
import sys
import traceback
from multiprocessing import resource_tracker
from pathlib import Path

import cloudpickle

import mpwatch
from support.process_state import difference, state

CLONE_NEWUTS = 0x04000000
PR_SET_PDEATHSIG = 1
SHARED = ("shared memory", "temporary files")  # which all nodes share; Job.close checks the folder of the job


def main(files, hostname):
    """Run the call, with a hostname of its own if there is one. The process ends with the tests at the latest."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if hostname:
        assert libc.unshare(CLONE_NEWUTS) == 0
        socket.sethostname(hostname)
        platform._uname_cache = None
    Path(f"{files}.outcome").write_bytes(run(*pickle.load(sys.stdin.buffer)))


def run(through, function, options):
    """Return the outcome of `mpwatch.run` or `mpwatch.main`, and what it has left in this process, as a pickle."""
    resource_tracker.ensure_running()  # a helper of multiprocessing, which runs as long as the program
    before = state()
    error = result = None
    try:
        result = getattr(mpwatch, through)(function, progress=False, **options)
    except BaseException as raised:
        traceback.print_exc()
        error, result = raised, getattr(raised, "result", None)
    # the type of the cause may be one of torch, which the test must not import
    cause = getattr(error, "__cause__", None)
    outcome = {"error": error, "cause": "".join(traceback.format_exception(cause)) if cause else "", "result": result}
    pickled = cloudpickle.dumps(outcome)
    del error, result, outcome, cause
    gc.collect()
    after = state()
    left = {name: repr(difference(before[name], after[name])) for name in before if before[name] != after[name]}
    return pickle.dumps((pickled, {name: text for name, text in left.items() if name not in SHARED}))


if __name__ == "__main__":
    main(*sys.argv[1:])
