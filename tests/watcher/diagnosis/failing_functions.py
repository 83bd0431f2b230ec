"""Functions for ranks that fail in every way, and that misuse their process."""

import atexit
import dataclasses
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from support.failing import (
    ExitsInStrError,
    HidesItsArgumentsError,
    KeywordOnlyError,
    RefusesAttributesError,
    call_on_rank_1,
    is_killed,
    nested_group,
    rank,
    state_of,
    wait_to_be_stopped,
)


def call_on_rank_1_when_others_sleep(action, pids):
    """Call `action` on rank 1 once the other ranks have stored their pids and sleep."""
    me = rank()
    if me != 1:
        pids[me] = os.getpid()
        wait_to_be_stopped()
    while not all(state_of(pids[other]) == "S" for other in range(len(pids)) if other != 1):
        os.sched_yield()
    return action()


def raises_from_cause():
    try:
        {}["lost key"]
    except KeyError as error:
        consequence = RuntimeError("while loading")
        consequence.add_note("shard 17")
        raise consequence from error


def raises_group():
    raise ExceptionGroup("two things", [ValueError("first"), ExceptionGroup("inner", [OSError(2, "second", "file")])])


def raises_with_a_lock():
    error = ValueError("holds a lock")
    error.lock = threading.Lock()
    error.code = 3
    raise error


def raises_keyboard_interrupt():
    raise KeyboardInterrupt("from the rank itself")


def exits_with_256():
    sys.exit(256)


def exits_with_text():
    sys.exit("cannot go on")


def calls_os_exit_with_0():
    os._exit(0)


def aborts():
    os.abort()


def reads_beyond_the_end_of_a_file():
    with open(os.memfd_create("short"), "r+b") as file:
        file.truncate(mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), 0)
        file.truncate(0)
        return memory[0]


def divides_by_zero_in_c():
    signal.raise_signal(signal.SIGFPE)


def executes_an_illegal_instruction():
    signal.raise_signal(signal.SIGILL)


def returns_a_lock():
    return {"model": [1, threading.Lock()]}


def returns_a_value_that_cannot_be_unpickled():
    return CannotBeUnpickled()


def _refuse():
    raise LookupError("not here")


class CannotBeUnpickled:
    def __reduce__(self):
        return _refuse, ()


def execs_a_program_that_exits_with_9():
    os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(9)"])


def closes_descriptors_and_raises():
    os.closerange(3, 4096)
    raise ValueError("the batch is bad")


def replaces_descriptors_and_returns():
    """Close all descriptors and open files with the same numbers. mpwatch must not write into these files."""
    os.closerange(3, 4096)
    for number in range(60):
        os.memfd_create(f"unrelated-{number}")
    atexit.register(_check_that_files_are_empty)
    return rank()


def _check_that_files_are_empty():
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if "unrelated" in os.readlink(path) and os.stat(path).st_size:
            os.kill(os.getpid(), signal.SIGKILL)  # the watcher logs a warning that the rank was killed


def leaves_a_thread_and_raises():
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("the batch is bad")


def ignores_sigterm(barrier):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    barrier.wait()
    if rank() == 1:
        raise ValueError("the batch is bad")
    wait_to_be_stopped()


def starts_a_helper(barrier, pids):
    """Start a helper process in the process group of each rank. Then rank 1 is killed."""
    helper = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    pids[rank()] = helper.pid
    barrier.wait()
    if rank() == 1:
        is_killed()
    wait_to_be_stopped()


def forks_a_child_that_waits(pid_of_child, barrier):
    """Fork a child on rank 1 that keeps every descriptor of the rank open, the channel included. Then rank 1 is killed."""
    if rank() == 1:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.alarm(60)
            signal.pause()
            os._exit(0)
        pid_of_child.value = pid
        while os.getsid(pid) != pid:  # else the watcher may kill the child with the group of the rank
            os.sched_yield()
    return call_on_rank_1(is_killed, barrier)


def reports_a_lost_peer_before_the_peer_fails(barrier, has_reported):
    """Raise on rank 0 as gloo does, before the root cause, rank 1, raises."""
    barrier.wait()
    if rank() == 1:
        has_reported.wait()
        raise ValueError("the batch is bad")
    if rank() == 0:
        has_reported.set()
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    wait_to_be_stopped()


def raises_connection_closed_by_peer():
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


def records_time_of_failure(barrier, failed_at):
    barrier.wait()
    if rank() == 1:
        failed_at.value = time.monotonic()
        raise ValueError("the batch is bad")
    wait_to_be_stopped()


def only_rank_1_returns():
    if rank() != 1:
        wait_to_be_stopped()


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class RaisesInStrError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class ExitsWhenPickledError(Exception):
    def __reduce__(self):
        sys.exit(0)


class TruthlessCode:
    def __repr__(self):
        return "TruthlessCode()"

    def __bool__(self):
        raise ValueError("ambiguous")


def with_invalid_notes(error):
    error.__notes__ = 5
    return error


class OwnTracebackError(Exception):
    def with_traceback(self, _):
        raise RuntimeError("no traceback")

    __traceback__ = property(lambda self: 1 / 0)


class OwnEverythingError(Exception):
    def __getattribute__(self, name):
        raise LookupError(name)


class ExitsWhenUnpickledText(str):
    __slots__ = ()

    def __reduce_ex__(self, _):
        return os._exit, (3,)


def with_a_note_that_exits():
    error = ValueError("x")
    error.add_note(ExitsWhenUnpickledText("note"))
    return error


STRANGE_EXCEPTIONS = {
    "own traceback": lambda: OwnTracebackError("x"),
    "own everything": lambda: OwnEverythingError("x"),
    "own note": with_a_note_that_exits,
    "frozen": lambda: FrozenError(3),
    "refuses attributes": lambda: RefusesAttributesError("x"),
    "exits as text": lambda: ExitsInStrError("x"),
    "raises as text": lambda: RaisesInStrError("x"),
    "exits when pickled": lambda: ExitsWhenPickledError("x"),
    "hides its arguments": lambda: HidesItsArgumentsError("x"),
    "odd notes": lambda: with_invalid_notes(ValueError("x")),
    "deep group": lambda: nested_group(2200),
    "wide group": lambda: ExceptionGroup("many", [ExceptionGroup("one", [ValueError(n)]) for n in range(1500)]),
}


def raises_strange_exception(name):
    error = STRANGE_EXCEPTIONS[name]()
    raise error


def raises_without_line_numbers():
    code = compile("raise ValueError('no line')", "generated", "exec").replace(co_linetable=b"")
    exec(code)


def exits_with(code):
    sys.exit(code)


def breaks_stdout_and_returns():
    class Broken:
        def flush(self):
            raise RuntimeError("cannot flush")

        def write(self, text):
            pass

    sys.stdout = Broken()
    return rank()


def returns_a_value_that_exits_when_pickled():
    return ExitsWhenPickledError("x")


def closes_descriptors_and_returns_2_mib():
    os.closerange(3, 4096)
    return bytes(2 << 20)


def exits_or_raises_at_sigterm(ending, barrier=None):
    """End at SIGTERM, as a training loop does that saves a checkpoint when a scheduler stops it."""

    def end(*_):
        os.write(1, b"received SIGTERM\n")
        if ending == "raise":
            raise InterruptedError("received SIGTERM")
        sys.exit(int(ending.split()[1]))

    signal.signal(signal.SIGTERM, end)
    if barrier is not None:
        barrier.wait()
        if rank() == 1:
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


def fails_first_but_reports_late(barrier, has_failed, other_was_reported):
    global _has_failed, _other_was_reported
    _has_failed, _other_was_reported = has_failed, other_was_reported
    barrier.wait()
    if rank() == 0:
        raise SlowTextError
    if rank() == 1:
        has_failed.wait()
        raise SetsEventWhenPickledError
    wait_to_be_stopped()


class HangsInStrError(Exception):
    def __str__(self):
        return str(wait_to_be_stopped())


class OsExitsInStrError(Exception):
    def __str__(self):
        return str(os._exit(5))


class ExitsWhenUnpickledError(Exception):
    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")

    def __reduce__(self):
        return os._exit, (5,)


class HangsWhenUnpickledError(Exception):
    def __reduce__(self):
        return wait_to_be_stopped, ()


def raises_exception_that_hangs_in_str():
    raise HangsInStrError


def raises_exception_that_exits_in_str():
    raise OsExitsInStrError


def raises_exception_that_exits_when_unpickled():
    raise ExitsWhenUnpickledError(7, detail="two arguments")


def raises_exception_that_hangs_when_unpickled():
    raise HangsWhenUnpickledError("the batch is bad")


class InterruptedWhenPickledError(Exception):
    """An exception that sends signals to its process when it is pickled."""

    def __reduce__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        return type(self), self.args


def raises_in_a_handler_again_and_again(number):
    """A thread sends the signal until the process ends."""

    def send():
        while True:
            os.kill(os.getpid(), number)

    def raise_in_handler(*_):
        raise RuntimeError("from the handler")

    signal.signal(number, raise_in_handler)
    threading.Thread(target=send, daemon=True).start()
    wait_to_be_stopped()


def raises_exception_that_is_interrupted_when_pickled():
    # this thread receives the signals if the main thread has blocked them
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    raise InterruptedWhenPickledError("the batch is bad")


def forks_a_child_that_raises():
    pid = os.fork()
    if pid == 0:
        raise ValueError("the batch is bad")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def opens_all_descriptors_and_raises():
    files = []
    while True:
        files.append(open(os.devnull))


def rank_0_raises_keyword_only_error():
    if rank() == 0:
        raise KeywordOnlyError(7, detail="two arguments")
    wait_to_be_stopped()


class TimerError(Exception):
    pass


def raise_timer_error(*_):
    raise TimerError


class TimerFiresInStrError(Exception):
    """An exception whose text raises SIGALRM, which has a handler that raises."""

    def __str__(self):
        signal.raise_signal(signal.SIGALRM)
        return "the batch is bad"


def raises_exception_whose_timer_fires_in_str():
    signal.signal(signal.SIGALRM, raise_timer_error)
    raise TimerFiresInStrError


def raises_own_error_when_its_peer_dies(barrier, die):
    """Let rank 1 die. The other ranks raise an error of their own as soon as their connection to rank 1 is closed."""
    if rank() == 1:
        path = f"\0mpwatch-test-{os.getppid()}"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            barrier.wait()
            peers = [server.accept()[0] for _ in range(2)]
            for peer in peers:
                peer.sendall(b"x")
            die()
    barrier.wait()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0mpwatch-test-{os.getppid()}")
        connection.recv(1)
        connection.recv(1)
    raise RuntimeError("lost my peer")


class ReportedBrokenPipeError(BrokenPipeError):
    def __str__(self):
        _has_failed.set()
        return "broken"


def loses_a_connection(barrier, has_failed, *, other_raises):
    """Raise BrokenPipeError on rank 0. Then rank 1 raises, too, or waits to be stopped."""
    global _has_failed
    _has_failed = has_failed
    barrier.wait()
    if rank() == 0:
        raise ReportedBrokenPipeError
    has_failed.wait()
    if other_raises:
        raise KeyError("lr")
    wait_to_be_stopped()
