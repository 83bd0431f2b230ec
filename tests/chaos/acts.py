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
    *preparations, end = action.split(" and ")
    return [*(PREPARATIONS[name] for name in preparations), ENDS[end]]


def handle(handler, *signals):
    for number in signals:
        signal.signal(number, handler)


def start_helpers():
    for _ in range(2):
        subprocess.Popen(["/bin/sleep", str(SECONDS)])


def fork():
    """Fork a child that keeps every descriptor of the rank open and stays in its process group."""
    if os.fork() == 0:
        wait()


def send_half_a_message():
    """Send the beginning of a message, whatever its form: a few bytes on each socket that the rank has inherited."""
    sockets = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and is_socket(fd)]
    assert sockets
    for fd in sockets:
        os.write(fd, b"\0\0")


def is_socket(fd):
    return os.path.exists(path := f"/proc/self/fd/{fd}") and os.readlink(path).startswith("socket:")


class KeywordOnlyError(Exception):
    """An exception that plain pickle cannot rebuild: it takes two arguments that are not in `args`."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")


def throw(error):
    raise error


def raise_a_deep_chain():
    error = None
    for depth in range(CHAIN_LENGTH):
        try:
            raise RuntimeError(f"cause {depth}") from error
        except RuntimeError as raised:
            error = raised
    raise error


def wait():
    while True:
        signal.pause()


def suspend_itself():
    os.kill(os.getpid(), signal.SIGSTOP)
    wait()


PREPARATIONS = {
    "leaves_a_thread": lambda: threading.Thread(target=threading.Event().wait).start(),
    "hangs_at_exit": lambda: atexit.register(wait),
    "closes_stderr": lambda: os.close(2),
    "changes_handlers": lambda: handle(lambda *_: None, *HANDLED),
    "ignores_sigterm_and_sigint": lambda: handle(signal.SIG_IGN, signal.SIGTERM, signal.SIGINT),
    "exits_with_0_at_sigterm": lambda: handle(lambda *_: sys.exit(0), signal.SIGTERM),
    "raises_at_sigterm": lambda: handle(lambda *_: throw(RuntimeError("received SIGTERM")), signal.SIGTERM),
    "blocks_signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
    # to that of the watcher: a rank leads its own group, so the kernel does not allow setsid
    "leaves_its_process_group": lambda: os.setpgid(0, os.getpgid(os.getppid())),
    "starts_helpers": start_helpers,
    "forks": fork,
    "sends_half_a_message": send_half_a_message,
}
ENDS = {
    "raises": lambda: throw(ValueError("the batch is bad")),
    "raises_keyword_only_error": lambda: throw(KeywordOnlyError(7, detail="two arguments")),
    "raises_a_deep_chain": raise_a_deep_chain,
    "raises_keyboard_interrupt": lambda: throw(KeyboardInterrupt("from the rank itself")),
    "exits": lambda: sys.exit(EXIT_CODE),
    "exits_with_0": lambda: sys.exit(0),
    "returns_a_lock": threading.Lock,
    "calls_os_exit": lambda: os._exit(EXIT_CODE),
    "calls_os_exit_with_0": lambda: os._exit(0),
    "execs_a_program_that_fails": lambda: os.execv("/bin/sh", ["sh", "-c", f"exit {EXIT_CODE}"]),
    "execs_a_program_that_waits": lambda: os.execv("/bin/sleep", ["sleep", str(SECONDS)]),
    "is_killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda: ctypes.string_at(0),
    "aborts": os.abort,
    "waits": wait,
    "suspends_itself": suspend_itself,
    "holds_the_gil": lambda: ctypes.PyDLL(None).usleep(SECONDS * 1_000_000),
    "returns": lambda: f"the value of rank {mpwatch.current_worker().rank}",
}
