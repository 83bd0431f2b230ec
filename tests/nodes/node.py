"""The process that forks the nodes. It imports torch once, so that a node starts in milliseconds.

    python -m nodes.node FD        FD: a socket for requests, which are pickles

It has one thread, also of the kernel, and has called nothing of mpwatch or torch. So a node inherits no state. A node that has
ended stays a zombie until `reap` is requested, so that no other process gets its pid.
"""

import ctypes
import gc
import os
import pickle
import platform
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import cloudpickle
import torch.distributed  # noqa: F401  for the nodes

import mpwatch
from support.process_state import difference, state

CLONE_NEWUTS = 0x04000000
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
MAX_REQUEST = 65536  # bytes
KERNEL_LAG_SECONDS = 10.0  # for which the kernel may still show a thread that has been joined
SHARED = ("shared memory", "temporary files")  # which all nodes share; Job.close checks the folder of the job


def main(fd):
    gc.freeze()
    with socket.socket(fileno=fd) as requests:
        while True:
            data = requests.recv(MAX_REQUEST)
            if not data:  # the tests are over
                return
            request = pickle.loads(data)
            answer = os.waitpid(request["reap"], 0)[1] if "reap" in request else fork(request, requests)
            requests.send(pickle.dumps(answer))


def fork(request, requests):
    assert len(os.listdir("/proc/self/task")) == 1
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            requests.close()
            be_node(**request)
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def be_node(call, files, hostname, environment):
    """Run the call in a process group of its own, with a hostname of its own if there is one. Write `files`.log and .outcome.

    As with a job of a shell, the forking process can continue the group. So SIGTSTP stops it.
    """
    os.setpgid(0, 0)
    log = os.open(f"{files}.log", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if hostname:
        assert LIBC.unshare(CLONE_NEWUTS) == 0
        socket.sethostname(hostname)
        platform._uname_cache = None
    os.environ.update(environment)
    Path(f"{files}.outcome").write_bytes(run(*pickle.loads(call)))


def run(through, function, options):
    """Return the outcome of `mpwatch.run` or `mpwatch.main`, and what it has left in this process, as a pickle."""
    resource_tracker.ensure_running()  # a helper of multiprocessing, which runs as long as the program
    before = take_inventory()
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
    after = take_late_inventory(before)
    left = {name: repr(difference(before[name], after[name])) for name in before if before[name] != after[name]}
    return pickle.dumps((pickled, left))


def take_inventory():
    """Return what this process holds. It includes threads of compiled code, such as those of the store."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended since
            names.append((task / "comm").read_text().strip())
    return {name: value for name, value in state().items() if name not in SHARED} | {"kernel threads": sorted(names)}


def take_late_inventory(before):
    deadline = time.monotonic() + KERNEL_LAG_SECONDS
    while (now := take_inventory())["kernel threads"] != before["kernel threads"] and time.monotonic() < deadline:
        os.sched_yield()
    return now


if __name__ == "__main__":
    main(int(sys.argv[1]))
