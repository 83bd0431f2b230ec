"""Functions for ranks that fail in every way. A rank imports this module, so it imports little."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

from support.failing import is_killed, rank, state_of, wait_to_be_stopped


def call_on_rank_1_when_others_sleep(action, pids, *args):
    """Call `action` on rank 1 once the other ranks have stored their pids and sleep."""
    me = rank()
    if me != 1:
        pids[me] = os.getpid()
        wait_to_be_stopped()
    while not all(state_of(pids[other]) == "S" for other in range(len(pids)) if other != 1):
        os.sched_yield()
    return action(*args)


# --- saboteurs


def raises_keyboard_interrupt():
    raise KeyboardInterrupt("from the rank itself")


def calls_os_exit_with_0():
    os._exit(0)


def aborts():
    os.abort()


def execs_a_program_that_exits_with_9():
    os.execv(sys.executable, [sys.executable, "-S", "-c", "raise SystemExit(9)"])


def opens_all_descriptors_and_raises():
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    files = []
    while True:
        files.append(open(os.devnull))


def returns_a_lock():
    return {"model": [1, threading.Lock()]}


class HangsWhenUnpickledError(Exception):
    def __reduce__(self):
        return wait_to_be_stopped, ()


def raises(error_class):
    raise error_class("the batch is bad")


EXIT_CODES = ["", 0.0, "text", 256]


def exits_with_strange_code():
    sys.exit(EXIT_CODES[rank()])


class RaisesWhenRebuilt:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return raise_error, (self.error,)


def raise_error(error):
    raise error


# --- ranks and what is around them


def starts_a_helper(barrier, pids):
    """Start a helper process in the process group of each rank. Then rank 1 is killed."""
    helper = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    pids[rank()] = helper.pid
    barrier.wait()
    if rank() == 1:
        is_killed()
    wait_to_be_stopped()


def ends_at_sigterm(pids, failing):
    """End at SIGTERM, as a training loop that saves a checkpoint when a scheduler stops it: each rank in its own way.

    If `failing`, rank 1 fails when the others wait. Else rank 1 returns.
    """

    def end(*_):
        os.write(1, b"received SIGTERM\n")
        if rank() == 0:
            raise InterruptedError("received SIGTERM")
        sys.exit(rank() - 2)

    signal.signal(signal.SIGTERM, end)
    return call_on_rank_1_when_others_sleep(*((raises, pids, ValueError) if failing else (rank, pids)))


class HangsInStrError(Exception):
    def __str__(self):
        return str(wait_to_be_stopped())


# --- who failed first


def reports_a_lost_peer_before_the_peer_fails(barrier, has_reported):
    """Raise on rank 0 as gloo does, before the root cause, rank 1, raises."""
    barrier.wait()
    if rank() == 1:
        has_reported.wait()
        raise ValueError("the batch is bad")
    sys.excepthook = lambda *_: has_reported.set()  # a rank calls it when it has sent the exception
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


def records_time_of_failure(barrier, failed_at):
    barrier.wait()
    if rank() == 1:
        failed_at.value = time.monotonic()
        raise ValueError("the batch is bad")
    wait_to_be_stopped()


class SlowTextError(Exception):
    """An exception whose text is ready only after another rank's failure was reported."""

    def __str__(self):
        _has_failed.set()
        _other_was_reported.wait()
        return "slow"


class SetsEventWhenPickledError(Exception):
    """An exception that sets an event when it is pickled, which is after its failure was reported."""

    def __reduce__(self):
        _other_was_reported.set()
        return SetsEventWhenPickledError, ()


def fails_first_but_reports_late(has_failed, other_was_reported):
    global _has_failed, _other_was_reported
    _has_failed, _other_was_reported = has_failed, other_was_reported
    if rank() == 0:
        raise SlowTextError
    has_failed.wait()
    raise SetsEventWhenPickledError


def raises_own_error_when_its_peer_dies(barrier):
    """Kill rank 1. The other ranks raise an error of their own as soon as their connection to rank 1 is closed."""
    path = f"\0mpwatch-test-{os.getppid()}"
    if rank() == 1:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            barrier.wait()
            peers = [server.accept()[0] for _ in range(2)]
            for peer in peers:
                peer.sendall(b"x")
            is_killed()
    barrier.wait()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.recv(1)
        connection.recv(1)
    raise RuntimeError("lost my peer")


def wait_until(condition):
    while not condition():
        os.sched_yield()


def suspend_the_watcher():
    os.kill(os.getppid(), signal.SIGSTOP)
    wait_until(lambda: state_of(os.getppid()) == "T")


def kill_two_while_the_watcher_is_suspended(pids):
    suspend_the_watcher()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: [state_of(pid) for pid in pids] == ["Z", "Z"])
    os.kill(os.getppid(), signal.SIGCONT)


class ResumesTheWatcherError(Exception):
    """An exception that resumes the watcher when it is pickled, which is after its failure was reported."""

    def __reduce__(self):
        os.kill(os.getppid(), signal.SIGCONT)
        return type(self), self.args


def two_fail_while_the_watcher_is_suspended(pids):
    """Suspend the watcher in rank 1. Then rank 2 dies, and then rank 0 raises."""
    pids[rank()] = os.getpid()
    wait_until(lambda: all(pids))
    if rank() == 1:
        suspend_the_watcher()
        wait_to_be_stopped()
    wait_until(lambda: state_of(os.getppid()) == "T")
    if rank() == 2:
        is_killed()
    wait_until(lambda: state_of(pids[2]) == "Z")
    raise ResumesTheWatcherError
