"""Functions for ranks that resist their end."""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

from support.failing import is_killed, rank, state_of, wait_in_a_thread, wait_to_be_stopped


def does_nothing():
    pass


def set_signal_handlers(handler):
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGRTMAX - 3}:
        signal.signal(number, handler)


def ignores_all_signals():
    set_signal_handlers(signal.SIG_IGN)


def ignores_all_signals_with_handlers():
    set_signal_handlers(lambda *_: None)


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


def closes_all_descriptors():
    os.closerange(0, 4096)


def closes_its_stderr():
    sys.stderr.close()
    with contextlib.suppress(OSError):
        os.close(2)


def joins_the_watchers_process_group():
    os.setpgid(0, os.getpgid(os.getppid()))


def tries_to_lead_a_session():
    with contextlib.suppress(PermissionError):  # the rank already leads a process group
        os.setsid()


def starts_a_helper_that_ignores_all_signals():
    read, write = os.pipe()
    if os.fork() == 0:
        ignores_all_signals()
        os.write(write, b"x")
        wait_to_be_stopped()
    os.read(read, 1)


def suspends_itself_then_waits():
    os.kill(os.getpid(), signal.SIGSTOP)
    wait_to_be_stopped()


def hangs_in_c():
    ctypes.PyDLL(None).usleep(600_000_000)


def hangs_in_c_and_handles_sigterm():
    signal.signal(signal.SIGTERM, lambda *_: None)
    hangs_in_c()


def lets_another_thread_take_the_signals():
    """Wait in a system call that no signal to the process ends, since the kernel gives each signal to the other thread."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    time.sleep(600)


def execs_a_program_that_ignores_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.execv("/bin/sleep", ["sleep", "600"])


def runs_beside_a_rank_that_resists(prepare, ending, pid, ended_at):
    """Prepare rank 0 to resist its end, and call `ending` on it. Rank 1 raises once rank 0 waits, if `ending` waits for that.

    The time of the failure or the return is stored in `ended_at`.
    """
    if rank() == 0:
        prepare()
        pid.value = os.getpid()
        return ending(ended_at)
    while not pid.value:
        os.sched_yield()
    if ending is returns_and_records_time:
        return 1
    if ending in (raises_and_records_time, is_killed_and_records_time):
        return wait_to_be_stopped()
    while not is_waiting(pid.value, ending.waiting):
        os.sched_yield()
    return raises_and_records_time(ended_at)


def rank_0_raises(pids, barrier):
    pids[rank()] = os.getpid()
    barrier.wait()
    if rank() == 0:
        raise ValueError("the batch is bad")
    wait_to_be_stopped()


def is_waiting(pid, waiting):
    if waiting is execs_a_program_that_ignores_sigterm:
        with open(f"/proc/{pid}/comm") as text:
            return text.read() == "sleep\n" and state_of(pid) == "S"
    return state_of(pid) == ("T" if waiting is suspends_itself_then_waits else "S")


def raises_and_records_time(ended_at):
    ended_at.value = time.monotonic()
    raise ValueError("the batch is bad")


def is_killed_and_records_time(ended_at):
    ended_at.value = time.monotonic()
    is_killed()


def returns_and_records_time(ended_at):
    ended_at.value = time.monotonic()
    return 0


class WaitsUntilSiblingFails:
    """An ending of rank 0: it calls `waiting` until rank 1 fails."""

    def __init__(self, waiting=wait_to_be_stopped):
        self.waiting = waiting

    def __call__(self, ended_at):
        self.waiting()


def encode_half_a_message():
    """Return the header of a large message and the beginning of its content."""
    from mpwatch.wire.messages import MessageKind, encode_frame

    return encode_frame(MessageKind.RETURNED, bytes(1 << 20))[: 1 << 10]


def sends_half_a_message_and_ends(barrier, pid, leaves_process_group, end):
    """Write a part of a message to the channel, then call `end`. A forked child keeps the channel open."""
    if rank() == 1:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            if leaves_process_group:
                os.setsid()
            os.write(write, b"x")
            signal.alarm(60)
            signal.pause()
            os._exit(0)
        os.read(read, 1)
        pid.value = child
    barrier.wait()
    if rank() == 1:
        os.write(multiprocessing.current_process().launch_info.channel_fd, encode_half_a_message())
        end()
    wait_to_be_stopped()


def joins_and_freezes_cgroup(cgroup):
    with open(f"{cgroup}/cgroup.procs", "w") as procs:
        procs.write(str(os.getpid()))
    with open(f"{cgroup}/freezer.state", "w") as state:
        state.write("FROZEN")


def fails_beside_a_frozen_rank(cgroup, pid, failed_at):
    if rank() == 0:
        pid.value = os.getpid()
        joins_and_freezes_cgroup(cgroup)
        wait_to_be_stopped()
    while not is_frozen(cgroup):
        os.sched_yield()
    raises_and_records_time(failed_at)


def is_frozen(cgroup):
    with open(f"{cgroup}/freezer.state") as state:
        return state.read() == "FROZEN\n"


PTRACE_SEIZE = 0x4206


PTRACE_CONT = 7


def is_traced_by_a_debugger(tracer, waits_for_rank):
    """Start a debugger of this rank in another process group. It waits for the rank's state changes if `waits_for_rank`."""
    pid = os.getpid()
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        libc = ctypes.CDLL(None)
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        libc.ptrace(PTRACE_SEIZE, pid, None, None)
        tracer.value = os.getpid()
        os.write(write, b"x")
        signal.alarm(60)
        while waits_for_rank and os.WIFSTOPPED(status := os.waitpid(pid, 0)[1]):
            libc.ptrace(PTRACE_CONT, pid, None, os.WSTOPSIG(status))
        signal.pause()
    os.read(read, 1)


def fails_beside_a_traced_rank(tracer, waits_for_rank, ending, ended_at):
    if rank() == 0:
        is_traced_by_a_debugger(tracer, waits_for_rank)
        return ending(ended_at) if ending is is_killed_and_records_time else wait_to_be_stopped()
    while not tracer.value:
        os.sched_yield()
    return wait_to_be_stopped() if ending is is_killed_and_records_time else raises_and_records_time(ended_at)
