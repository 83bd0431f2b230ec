"""What ranks do in a history, by name, and all of it really. Runs in ranks.

Each act gets its Cue: it says when the act begins to matter, by `now`, immediately before it does.
"""

import atexit
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time

from board import Board
from histories import History

import mpwatch
from mpwatch.wire.messages import MessageKind, encode_frame

SECONDS = 600  # as good as for ever: the harness has long ended it
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM)
DEPTH = 60


class Cue:
    """When, and with which number."""

    def __init__(self, board, rank, number):
        self._board = board
        self.rank = rank
        self.number = number

    def now(self):
        self._board.write_of(self.rank)


def live(history: History, folder: str):
    """The function of every rank."""
    global _board
    rank = mpwatch.current_worker().rank
    part = history.parts[rank]
    # kept for ever: once an act has closed its descriptors, to close it would close somebody else's
    _board = Board(folder, len(history.parts))
    _board.arrive()
    if not part.at_once:
        _board.wait_for_all(rank)
        time.sleep(part.delay)
    return globals()[part.act](Cue(_board, rank, part.number))


def value_of(rank):
    return f"the value of rank {rank}"


def wait_to_be_stopped():
    while True:
        signal.pause()


class PickyError(Exception):
    """Plain pickle cannot rebuild it: two arguments that it does not keep in args."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")


def raises(cue):
    cue.now()
    raise ValueError("the batch is bad")


def raises_picky(cue):
    cue.now()
    raise PickyError(7, detail="two arguments")


def raises_a_deep_chain(cue):
    error = None
    for depth in range(DEPTH):
        try:
            raise RuntimeError(f"link {depth}") from error
        except RuntimeError as link:
            error = link
    cue.now()
    raise error


def raises_keyboard_interrupt(cue):
    cue.now()
    raise KeyboardInterrupt("from the rank itself")


def exits(cue):
    cue.now()
    sys.exit(cue.number)


def leaves_a_thread():
    threading.Thread(target=threading.Event().wait).start()


def leaves_a_thread_and_raises(cue):
    leaves_a_thread()
    raises(cue)


def leaves_a_thread_and_returns(cue):
    leaves_a_thread()
    return returns(cue)


def hangs_at_exit_and_raises(cue):
    atexit.register(wait_to_be_stopped)
    raises(cue)


def hangs_at_exit_and_returns(cue):
    atexit.register(wait_to_be_stopped)
    return returns(cue)


def close_descriptors():
    os.closerange(3, 4096)


def closes_descriptors_and_raises(cue):
    close_descriptors()
    raises(cue)


def closes_descriptors_and_vanishes(cue):
    close_descriptors()
    vanishes(cue)


def closes_descriptors_and_returns(cue):
    close_descriptors()
    return returns(cue)


def closes_stderr_and_raises(cue):
    os.close(2)
    raises(cue)


def change_handlers():
    for number in HANDLED:
        signal.signal(number, lambda *_: None)


def changes_handlers_and_raises(cue):
    change_handlers()
    raises(cue)


def changes_handlers_and_waits(cue):
    change_handlers()
    waits(cue)


def changes_handlers_and_returns(cue):
    change_handlers()
    return returns(cue)


def block_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def blocks_signals_and_raises(cue):
    block_signals()
    raises(cue)


def blocks_signals_and_waits(cue):
    block_signals()
    waits(cue)


def leave_group():
    """For the watcher's: a rank leads its own, so the kernel does not let it make another one by setsid."""
    os.setpgid(0, os.getpgid(os.getppid()))


def leaves_its_group_and_raises(cue):
    leave_group()
    raises(cue)


def leaves_its_group_and_waits(cue):
    leave_group()
    waits(cue)


def start_helpers():
    for _ in range(2):
        subprocess.Popen(["/bin/sleep", str(SECONDS)])


def starts_helpers_and_raises(cue):
    start_helpers()
    raises(cue)


def starts_helpers_and_waits(cue):
    start_helpers()
    waits(cue)


def starts_helpers_and_returns(cue):
    start_helpers()
    return returns(cue)


def returns_a_lock(cue):
    cue.now()
    return threading.Lock()


def vanishes(cue):
    cue.now()
    os._exit(cue.number)


def vanishes_as_if_all_were_well(cue):
    cue.now()
    os._exit(0)


def becomes_a_program_that_fails(cue):
    cue.now()
    os.execv("/bin/sh", ["sh", "-c", f"exit {cue.number}"])


def becomes_a_program_that_waits(cue):
    cue.now()
    os.execv("/bin/sleep", ["sleep", str(SECONDS)])


def is_killed(cue):
    cue.now()
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(cue):
    cue.now()
    ctypes.string_at(0)


def aborts(cue):
    cue.now()
    os.abort()


def fork_one_that_waits():
    """It holds every descriptor of the rank, and is in its group."""
    if os.fork() == 0:
        wait_to_be_stopped()


def forks_and_is_killed(cue):
    fork_one_that_waits()
    is_killed(cue)


def forks_and_waits(cue):
    fork_one_that_waits()
    waits(cue)


def send_half_a_message():
    channel = next(thing for thing in gc.get_objects() if type(thing).__name__ == "Channel" and hasattr(thing, "_fd"))
    os.write(channel._fd, encode_frame(MessageKind.RAISED, bytes(1000))[:500])


def is_killed_within_a_message(cue):
    fork_one_that_waits()
    send_half_a_message()
    is_killed(cue)


def waits_within_a_message(cue):
    send_half_a_message()
    waits(cue)


def waits(cue):
    cue.now()
    wait_to_be_stopped()


def stops_itself(cue):
    cue.now()
    os.kill(os.getpid(), signal.SIGSTOP)
    wait_to_be_stopped()


def is_deaf(cue):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waits(cue)


def holds_the_gil(cue):
    cue.now()
    ctypes.PyDLL(None).usleep(SECONDS * 1_000_000)


def exits_well_when_told(cue):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    waits(cue)


def raise_when_told(*_):
    raise RuntimeError("told to stop")


def raises_when_told(cue):
    signal.signal(signal.SIGTERM, raise_when_told)
    waits(cue)


def returns(cue):
    cue.now()
    return value_of(cue.rank)


def exits_well(cue):
    cue.now()
    sys.exit(0)
