"""A process that has imported torch, once, and from which nodes are forked: each starts in milliseconds, like new.

    python -m nodes.nursery FD        FD: a socket, on which requests come, each a JSON object with descriptors

It has one thread, of the kernel too, and has called nothing of mpwatch's or torch's; what a node is, becomes or leaves is
therefore its own. A node that has ended stays a zombie until it is asked for, so that its pid remains its own.
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

from . import node_program

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
LARGEST = 65536  # bytes of a request
MOST_DESCRIPTORS = 3


def main(fd):
    gc.freeze()
    with socket.socket(fileno=fd) as requests:
        while True:
            data, fds, _, _ = socket.recv_fds(requests, LARGEST, MOST_DESCRIPTORS)
            if not data:  # the tests are over
                return
            request = json.loads(data)
            answer = os.waitpid(request["reap"], 0)[1] if "reap" in request else _fork(request, requests, fds)
            for received in fds:
                os.close(received)
            requests.send(json.dumps(answer).encode())


def _fork(request, requests, fds):
    assert len(os.listdir("/proc/self/task")) == 1
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nursery:
            status = _be_node(request, requests, *fds)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _be_node(request, requests, tell, log, network=None):
    """In the process of its own: in a session of its own, on a host of its own as far as that was asked for."""
    requests.close()
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if request["hostname"]:
        _must(LIBC.unshare(CLONE_NEWUTS))
        socket.sethostname(request["hostname"])
        platform._uname_cache = None  # torch has asked for it
    if network is not None:
        _must(LIBC.setns(network, CLONE_NEWNET))
        os.close(network)
    os.environ.update(request["environment"])
    getattr(node_program, request["do"])(request, tell)
    return 0


def _must(returned):
    if returned:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    assert mpwatch.run  # it is loaded now
    main(int(sys.argv[1]))
