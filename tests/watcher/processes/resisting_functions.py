"""Functions for ranks that resist their end."""

import atexit
import contextlib
import ctypes
import os
import signal
import stat
import threading
import time

from support.failing import is_killed, rank, state_of, wait_in_a_thread, wait_to_be_stopped

# ---- what rank 0 does before it ends or waits


def does_nothing():
    pass


def ignores_all_signals():
    asks_for_stacks = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGEMT
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, asks_for_stacks}:
        signal.signal(number, signal.SIG_IGN)


def blocks_all_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def hangs_at_exit():
    atexit.register(wait_to_be_stopped)


def hangs_at_exit_and_blocks_all_signals():
    blocks_all_signals()
    hangs_at_exit()


def suspends_itself_at_exit():
    atexit.register(os.kill, os.getpid(), signal.SIGSTOP)


def starts_a_thread_that_never_ends():
    threading.Thread(target=wait_in_a_thread, name="endless").start()


def joins_the_watchers_process_group():
    os.setpgid(0, os.getpgid(os.getppid()))


def starts_a_helper_that_ignores_all_signals():
    read, write = os.pipe()
    if os.fork() == 0:
        ignores_all_signals()
        os.write(write, b"x")
        wait_to_be_stopped()
    os.read(read, 1)


# ---- how rank 0 waits


def suspends_itself_then_waits():
    os.kill(os.getpid(), signal.SIGSTOP)
    wait_to_be_stopped()


def hangs_in_c():
    signal.signal(signal.SIGTERM, lambda *_: None)
    ctypes.PyDLL(None).usleep(600_000_000)


def execs_a_program_that_ignores_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.execv("/bin/sleep", ["sleep", "600"])


# ---- how rank 0 ends


def raises(ended_at):
    ended_at.value = time.monotonic()
    raise ValueError("the batch is bad")


def returns(ended_at):
    ended_at.value = time.monotonic()
    return 0


def runs_beside_a_rank_that_resists(prepare, end, wait, pid, ended_at):
    """Rank 0 prepares to resist, and then ends or waits. If it waits, rank 1 raises. The time of the end is in `ended_at`."""
    if rank() == 0:
        prepare()
        pid.value = os.getpid()
        return end(ended_at) if end else wait()
    if end is returns:
        return 1
    if end:
        return wait_to_be_stopped()
    while not is_waiting(pid.value, wait):
        os.sched_yield()
    return raises(ended_at)


def is_waiting(pid, wait):
    if wait is execs_a_program_that_ignores_sigterm:
        with open(f"/proc/{pid or 'self'}/comm") as text:
            return text.read() == "sleep\n" and state_of(pid) == "S"
    return state_of(pid) == ("T" if wait is suspends_itself_then_waits else "S")


# ---- ranks whose end the watcher sees late, or not at all


def sends_a_part_of_a_message_and_is_killed(barrier, pid):
    """Write a byte to each socket to the watcher, and die. A child in a session of its own keeps the sockets open."""
    if rank() == 1:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.setsid()
            os.write(write, b"x")
            signal.alarm(60)
            signal.pause()
            os._exit(0)
        os.read(read, 1)
        pid.value = child
    barrier.wait()
    if rank() == 1:
        for fd in range(3, 256):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, b"m")
        is_killed()
    wait_to_be_stopped()


def fails_beside_a_frozen_rank(cgroup, pid, failed_at):
    state = f"{cgroup}/freezer.state"
    if rank() == 0:
        pid.value = os.getpid()
        for file, text in ((f"{cgroup}/cgroup.procs", str(pid.value)), (state, "FROZEN")):
            with open(file, "w") as opened:
                opened.write(text)
        wait_to_be_stopped()
    while open(state).read() != "FROZEN\n":
        os.sched_yield()
    raises(failed_at)
