"""Import torch once, and fork each node from this process, so that a node starts in milliseconds.

    python -m nodes.fork_server FD        FD: a socket for requests; each is a JSON object with descriptors

This process has one thread, also of the kernel, and has called nothing of mpwatch or torch. So a node inherits no state. A node
that has ended stays a zombie until `reap` is requested, so that no other process gets its pid.
"""

import ctypes
import gc
import json
import os
import platform
import signal
import socket
import sys
import traceback

import mpwatch
from nodes import node_program

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
MAX_REQUEST = 65536  # bytes of a request
MAX_DESCRIPTORS = 3


def main(fd):
    gc.freeze()
    with socket.socket(fileno=fd) as requests:
        while True:
            data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, MAX_DESCRIPTORS)
            if not data:  # the tests are over
                return
            request = json.loads(data)
            answer = os.waitpid(request["reap"], 0)[1] if "reap" in request else _fork(request, requests, fds)
            for received in fds:
                os.close(received)
            requests.send(json.dumps(answer).encode())


def _fork(request, requests, fds):
    assert len(os.listdir("/proc/self/task")) == 1
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            status = _run_node(request, requests, *fds)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_node(request, requests, pipe, log, network=None):
    """Run the request in the forked process, in a process group of its own, and on a host of its own if the request says so.

    As with a job of a shell, this process can continue the group. So SIGTSTP stops it.
    """
    requests.close()
    os.setpgid(0, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if request["hostname"]:
        _check(LIBC.unshare(CLONE_NEWUTS))
        socket.sethostname(request["hostname"])
        platform._uname_cache = None  # torch has asked for it
    if network is not None:
        _check(LIBC.setns(network, CLONE_NEWNET))
        os.close(network)
    os.environ.update(request["environment"])
    getattr(node_program, request["do"])(request, pipe)
    return 0


def _check(returned):
    if returned:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    assert mpwatch.run  # it is loaded now
    main(int(sys.argv[1]))
