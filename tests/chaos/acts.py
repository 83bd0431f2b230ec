"""The actions of ranks in a history, by name. This module runs in the ranks, and nothing in it is simulated.

An action is an end, such as "raises", or preparations and an end, such as "leaves_a_thread and raises". An end gets an
ActionContext. It calls `record_start` immediately before it does what matters for the run.
"""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import mpwatch
from chaos.board import EventTimes
from chaos.histories import History

SECONDS = 600  # longer than any history: the harness ends it before
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM)
CHAIN_LENGTH = 60


class ActionContext:
    """What an action knows: its rank and its number. It also records when the action begins."""

    def __init__(self, event_times, rank, number):
        self._event_times = event_times
        self.rank = rank
        self.number = number

    def record_start(self):
        self._event_times.record_rank(self.rank)


def run_rank(history: History, folder: str):
    """The function of every rank."""
    global _event_times
    rank = mpwatch.current_worker().rank
    plan = history.plans[rank]
    # never closed: after an action has closed its descriptors, that would close an unrelated one
    _event_times = EventTimes(folder, len(history.plans))
    _event_times.announce_start()
    if not plan.at_once:
        _event_times.wait_for_all_ranks(rank)
        time.sleep(plan.delay)
    *preparations, end = parse_action(plan.action)
    for prepare in preparations:
        prepare()
    return end(ActionContext(_event_times, rank, plan.number))


def parse_action(action: str):
    """Return the functions of an action."""
    return [globals()[name] for name in action.split(" and ")]


def expected_value(rank):
    return f"the value of rank {rank}"


def wait_to_be_stopped():
    while True:
        signal.pause()


# --- preparations


def leaves_a_thread():
    threading.Thread(target=threading.Event().wait).start()


def hangs_at_exit():
    atexit.register(wait_to_be_stopped)


def closes_stderr():
    os.close(2)


def changes_handlers():
    for number in HANDLED:
        signal.signal(number, lambda *_: None)


def ignores_sigterm_and_sigint():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def blocks_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def leaves_its_process_group():
    """Move to the watcher's process group. A rank leads its own group, so the kernel does not allow setsid."""
    os.setpgid(0, os.getpgid(os.getppid()))


def starts_helpers():
    for _ in range(2):
        subprocess.Popen(["/bin/sleep", str(SECONDS)])


def forks():
    """Fork a child that keeps every descriptor of the rank open and stays in its process group."""
    if os.fork() == 0:
        wait_to_be_stopped()


def exits_with_0_at_sigterm():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def raises_at_sigterm():
    def raise_error(*_):
        raise RuntimeError("received SIGTERM")

    signal.signal(signal.SIGTERM, raise_error)


def sends_half_a_message():
    """Send the beginning of a message, whatever its form: a few bytes on each socket that the rank has inherited."""
    sockets = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and is_socket(fd)]
    assert sockets
    for fd in sockets:
        os.write(fd, b"\0\0")


def is_socket(fd):
    return os.path.exists(path := f"/proc/self/fd/{fd}") and os.readlink(path).startswith("socket:")


# --- ends


class KeywordOnlyError(Exception):
    """An exception that plain pickle cannot rebuild: it takes two arguments that are not in `args`."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")


def raises(context):
    context.record_start()
    raise ValueError("the batch is bad")


def raises_keyword_only_error(context):
    context.record_start()
    raise KeywordOnlyError(7, detail="two arguments")


def raises_a_deep_chain(context):
    error = None
    for depth in range(CHAIN_LENGTH):
        try:
            raise RuntimeError(f"cause {depth}") from error
        except RuntimeError as raised:
            error = raised
    context.record_start()
    raise error


def raises_keyboard_interrupt(context):
    context.record_start()
    raise KeyboardInterrupt("from the rank itself")


def exits(context):
    context.record_start()
    sys.exit(context.number)


def returns_a_lock(context):
    context.record_start()
    return threading.Lock()


def calls_os_exit(context):
    context.record_start()
    os._exit(context.number)


def calls_os_exit_with_0(context):
    context.record_start()
    os._exit(0)


def execs_a_program_that_fails(context):
    context.record_start()
    os.execv("/bin/sh", ["sh", "-c", f"exit {context.number}"])


def execs_a_program_that_waits(context):
    context.record_start()
    os.execv("/bin/sleep", ["sleep", str(SECONDS)])


def is_killed(context):
    context.record_start()
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(context):
    context.record_start()
    ctypes.string_at(0)


def aborts(context):
    context.record_start()
    os.abort()


def waits(context):
    context.record_start()
    wait_to_be_stopped()


def suspends_itself(context):
    context.record_start()
    os.kill(os.getpid(), signal.SIGSTOP)
    wait_to_be_stopped()


def holds_the_gil(context):
    context.record_start()
    ctypes.PyDLL(None).usleep(SECONDS * 1_000_000)


def returns(context):
    context.record_start()
    return expected_value(context.rank)


def exits_with_0(context):
    context.record_start()
    sys.exit(0)
