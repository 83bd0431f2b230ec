"""What ranks do in tests of failures, by name. This module runs in the ranks, and nothing in it is simulated.

An action is an end, such as "raises", or preparations and an end, such as "leaves_a_thread and raises".
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading

from support import failing

EXIT_CODE, CHAIN_LENGTH = 77, 60
SECONDS = 600  # longer than any test
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM)


def act(action: str):
    *preparations, end = parse_action(action)
    for prepare in preparations:
        prepare()
    return end()


def parse_action(action: str):
    """Return the functions of an action."""
    *preparations, end = action.split(" and ")
    return [*(PREPARATIONS[name] for name in preparations), ENDS[end]]


def handle(handler, *signals):
    for number in signals:
        signal.signal(number, handler)


def ignore_all_signals():
    asks_for_stacks = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGEMT
    handle(signal.SIG_IGN, *(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, asks_for_stacks}))


def start_helpers():
    for _ in range(2):
        subprocess.Popen(["/bin/sleep", str(SECONDS)])


def start_a_helper_that_ignores_all_signals():
    read, write = os.pipe()
    if os.fork() == 0:
        ignore_all_signals()
        os.write(write, b"x")
        failing.wait_to_be_stopped()
    os.read(read, 1)


def fork():
    """Fork a child that keeps every descriptor of the rank open and stays in its process group."""
    if os.fork() == 0:
        failing.wait_to_be_stopped()


def send_half_a_message():
    """Send the beginning of a message, whatever its form: a few bytes on each socket that the rank has inherited."""
    sockets = [fd for fd in range(3, 256) if is_socket(fd)]
    assert sockets
    for fd in sockets:
        os.write(fd, b"\0\0")


def is_socket(fd):
    with contextlib.suppress(OSError):  # it is not open
        return stat.S_ISSOCK(os.fstat(fd).st_mode)


def open_all_descriptors_and_raise():
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    files = []
    while True:
        files.append(open(os.devnull))


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


def suspend_itself():
    os.kill(os.getpid(), signal.SIGSTOP)
    failing.wait_to_be_stopped()


def hold_the_gil():
    mutex = ctypes.create_string_buffer(64)  # zeros: it is not locked
    for _ in range(2):  # the second call waits for ever, and no signal interrupts it
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


PREPARATIONS = {
    "leaves_a_thread": lambda: threading.Thread(target=failing.wait_in_a_thread, name="endless").start(),
    "leaves_a_process": lambda: multiprocessing.get_context("spawn").Process(target=failing.wait_in_a_thread).start(),
    "hangs_at_exit": lambda: atexit.register(failing.wait_to_be_stopped),
    "suspends_itself_at_exit": lambda: atexit.register(os.kill, os.getpid(), signal.SIGSTOP),
    "closes_stderr": lambda: os.close(2),
    "changes_handlers": lambda: handle(lambda *_: None, *HANDLED),
    "ignores_sigterm_and_sigint": lambda: handle(signal.SIG_IGN, signal.SIGTERM, signal.SIGINT),
    "ignores_all_signals": ignore_all_signals,
    "exits_with_0_at_sigterm": lambda: handle(lambda *_: sys.exit(0), signal.SIGTERM),
    "raises_at_sigterm": lambda: handle(lambda *_: throw(RuntimeError("received SIGTERM")), signal.SIGTERM),
    "blocks_signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
    # to that of the watcher: a rank leads its own group, so the kernel does not allow setsid
    "leaves_its_process_group": lambda: os.setpgid(0, os.getpgid(os.getppid())),
    "starts_helpers": start_helpers,
    "starts_a_helper_that_ignores_all_signals": start_a_helper_that_ignores_all_signals,
    "forks": fork,
    "sends_half_a_message": send_half_a_message,
}
ENDS = {
    "raises": failing.raises_value_error,
    "raises_keyword_only_error": failing.raises_keyword_only_error,
    "raises_a_deep_chain": raise_a_deep_chain,
    "raises_keyboard_interrupt": lambda: throw(KeyboardInterrupt("from the rank itself")),
    "recurses": failing.recurses,
    "opens_all_descriptors": open_all_descriptors_and_raise,
    "exits": lambda: sys.exit(EXIT_CODE),
    "exits_with_256": lambda: sys.exit(256),
    "exits_with_0": lambda: sys.exit(0),
    "returns_a_lock": lambda: {"model": [1, threading.Lock()]},
    "calls_os_exit": lambda: os._exit(EXIT_CODE),
    "calls_os_exit_with_0": lambda: os._exit(0),
    "execs_a_program_that_fails": lambda: os.execv("/bin/sh", ["sh", "-c", f"exit {EXIT_CODE}"]),
    "execs_a_program_that_waits": lambda: os.execv("/bin/sleep", ["sleep", str(SECONDS)]),
    "is_killed": failing.is_killed,
    "is_terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "crashes": failing.crashes,
    "aborts": os.abort,
    "waits": failing.wait_to_be_stopped,
    "suspends_itself": suspend_itself,
    "holds_the_gil": hold_the_gil,
    "returns": lambda: f"the value of rank {failing.rank()}",
}
