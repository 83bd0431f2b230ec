"""Functions for ranks that fail, hang or fall silent. A rank imports this module, so it imports little."""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time

import mpwatch
from support.failing import is_killed, rank, state_of, wait_in_a_thread, wait_to_be_stopped


def wait_until(condition):
    while not condition():
        os.sched_yield()


def call_on_rank_1_when_others_sleep(action, pids, *args, prepare=tuple, others=wait_to_be_stopped, state="S"):
    """Call `action` on rank 1 once the other ranks have prepared and sleep in `others`; with the state "T": are suspended."""
    me = rank()
    if me != 1:
        prepare()
        pids[me] = os.getpid()
        return others()
    wait_until(lambda: all(pid and state_of(pid) == state for other, pid in enumerate(pids) if other != 1))
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
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    files = []
    while True:
        files.append(open(os.devnull))


def returns_a_lock():
    return {"model": [1, threading.Lock()]}


class HangsWhenUnpickledError(Exception):
    def __reduce__(self):
        return wait_to_be_stopped, ()


class HangsInStrError(Exception):
    def __str__(self):
        return str(wait_to_be_stopped())


def raises(error_class):
    raise error_class("the batch is bad")


class RaisesWhenRebuilt:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return raise_error, (self.error,)


def raise_error(error):
    raise error


# --- ranks and what is around them


def starts_a_helper(barrier, pids):
    pids[rank()] = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", "import signal; signal.pause()"], os.environ)
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
    """Its text is ready only after another rank's failure was reported."""

    def __str__(self):
        _has_failed.set()
        _other_was_reported.wait()
        return "slow"


class SetsEventWhenPickledError(Exception):
    """It is pickled after its failure was reported."""

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
    """It is pickled after its failure was reported."""

    def __reduce__(self):
        os.kill(os.getppid(), signal.SIGCONT)
        return type(self), self.args


def two_fail_while_the_watcher_is_suspended(pids):
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


# --- stacks


def starts_many_threads():
    for _ in range(120):
        threading.Thread(target=wait_in_a_thread, daemon=True).start()


def holds_the_gil():
    ctypes.PyDLL(None).usleep(60_000_000)


def suspends_itself():
    os.kill(os.getpid(), signal.SIGSTOP)
    wait_to_be_stopped()


def recurses_then_waits(depth=200):
    if depth:
        recurses_then_waits(depth - 1)
    wait_to_be_stopped()


def crashes_with_faulthandler_enabled(path=None):
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(**({"file": open(path, "w")} if path else {}))
    ctypes.string_at(0)


# --- heartbeats and reports


def report_steps(has_reported):
    for step in range(3):
        mpwatch.report(step=step, total=3, loss=1 / (step + 1), ready=True)
    if rank() == 0:
        has_reported.set()
        wait_to_be_stopped()
    mpwatch.report(step=7)
    has_reported.wait()
    is_killed()


def beat_until(condition):
    while not condition():
        mpwatch.heartbeat()
        time.sleep(0.01)


def beat_forever():
    beat_until(lambda: False)


def stop_heartbeats_in_three_ways(barrier):
    mpwatch.heartbeat()
    barrier.wait()
    (beat_forever, wait_to_be_stopped, holds_the_gil, suspends_itself)[rank()]()


class SlowToPickle:
    def __reduce__(self):
        signal.sigtimedwait([], 0.6)  # longer than the limit; no heartbeat is sent here
        return str, ("at last",)


def have_no_limit():
    if rank() == 0:
        mpwatch.heartbeat()
        return SlowToPickle()
    signal.sigtimedwait([], 0.6)
    return "never"


def beat_in_a_fork():
    mpwatch.heartbeat()
    if os.fork() == 0:
        beat_forever()
    wait_to_be_stopped()


def beat_until_sigusr1():
    received = []
    signal.signal(signal.SIGUSR1, lambda *_: received.append(True))
    mpwatch.heartbeat()
    os.write(1, f"{os.getpid()}\n".encode())
    beat_until(lambda: received)
    return True


def run_until_sigusr1():
    print(list(mpwatch.run(beat_until_sigusr1, 2, heartbeat_timeout=1.0)))
