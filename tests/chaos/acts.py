"""The actions of ranks in a history, by name. This module runs in the ranks, and nothing in it is simulated.

An action is an end, such as "raises", or preparations and an end, such as "leaves_a_thread and raises".
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
from chaos.board import CALLED, FIRST_RANK, EventTimes
from chaos.histories import CHAIN_LENGTH, EXIT_CODE, History

SECONDS = 600  # longer than any history: the harness ends it before
START_SECONDS = 0.4  # from the call of `run` until all ranks run, on an idle machine
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM)


def run_rank(history: History, folder: str):
    """The function of every rank."""
    rank = mpwatch.current_worker().rank
    plan, times = history.plans[rank], EventTimes(folder)
    if not plan.at_once:
        time.sleep(max(0.0, times.read(CALLED) + START_SECONDS + plan.delay - time.monotonic()))
    *preparations, end = parse_action(plan.action)
    for prepare in preparations:
        prepare()
    times.record(FIRST_RANK + rank)
    return end()


def parse_action(action: str):
    """Return the functions of an action."""
    return [globals()[name] for name in action.split(" and ")]


# --- preparations


def leaves_a_thread():
    threading.Thread(target=threading.Event().wait).start()


def hangs_at_exit():
    atexit.register(waits)


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
        waits()


def exits_with_0_at_sigterm():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def raises_at_sigterm():
    signal.signal(signal.SIGTERM, lambda *_: raises())


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


def raises():
    raise ValueError("the batch is bad")


def raises_keyword_only_error():
    raise KeywordOnlyError(7, detail="two arguments")


def raises_a_deep_chain(depth=CHAIN_LENGTH):
    try:
        if depth > 1:
            raises_a_deep_chain(depth - 1)
    except RuntimeError as error:
        raise RuntimeError(f"cause {depth}") from error
    raise RuntimeError("the first cause")


def raises_keyboard_interrupt():
    raise KeyboardInterrupt("from the rank itself")


def exits():
    sys.exit(EXIT_CODE)


def returns_a_lock():
    return threading.Lock()


def calls_os_exit():
    os._exit(EXIT_CODE)


def calls_os_exit_with_0():
    os._exit(0)


def execs_a_program_that_fails():
    os.execv("/bin/sh", ["sh", "-c", f"exit {EXIT_CODE}"])


def execs_a_program_that_waits():
    os.execv("/bin/sleep", ["sleep", str(SECONDS)])


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def crashes():
    ctypes.string_at(0)


def aborts():
    os.abort()


def waits():
    while True:
        signal.pause()


def suspends_itself():
    os.kill(os.getpid(), signal.SIGSTOP)
    waits()


def holds_the_gil():
    ctypes.PyDLL(None).usleep(SECONDS * 1_000_000)


def returns():
    return f"the value of rank {mpwatch.current_worker().rank}"


def exits_with_0():
    sys.exit(0)
