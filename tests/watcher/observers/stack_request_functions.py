"""Functions whose ranks wait at a place that stacks show, and a program for terminals that calls them."""

import os
import signal
import threading

import mpwatch
from support.functions import rank


def wait_at_gate(path):
    os.close(os.open(path, os.O_RDONLY))
    return rank()


def wait_in_a_file_with_an_odd_name(path):
    code = compile("os.close(os.open(path, os.O_RDONLY))", "/tmp/\x1b[31m\n.py", "exec")
    exec(code, {"os": os, "path": path})


def release_at_gate(path, release):
    os.close(os.open(path, os.O_RDONLY))
    release()


def wait_at_gate_or_in_a_lock(path):
    if rank() != 1:
        return wait_at_gate(path)
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=release_at_gate, args=(path, lock.release)).start()
    lock.acquire()
    return rank()


def wait_and_say(path):
    print(f"rank {rank()} waits", flush=True)
    return wait_at_gate(path)


def main(kind, path):
    handler = signal.SIG_DFL  # the tests may run with SIGQUIT ignored
    if kind == "handler":
        handler = lambda *_: print("the user's handler", flush=True)  # noqa: E731
    signal.signal(signal.SIGQUIT, handler)
    print(f"values: {list(mpwatch.run(wait_and_say, 2, args=(path,), progress=False))}")
    print(f"handler: {signal.getsignal(signal.SIGQUIT) is handler}")
