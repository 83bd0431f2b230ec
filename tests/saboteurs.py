"""Functions for ranks that fail, hang, or misuse their process. They are sent to the ranks by reference, so this module is importable."""

import atexit
import contextlib
import ctypes
import dataclasses
import mmap
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import mpwatch


def rank():
    return mpwatch.current_worker().rank


def wait_to_be_stopped():
    while True:
        signal.pause()


def call_on_rank_1(action, barrier, *args):
    """Call `action` on rank 1 once all ranks run. The other ranks wait until they are stopped."""
    barrier.wait()
    if rank() == 1:
        return action(*args)
    return wait_to_be_stopped()


def call_on_rank_1_when_others_sleep(action, pids):
    """Call `action` on rank 1 once the other ranks have stored their pids and sleep."""
    me = rank()
    if me != 1:
        pids[me] = os.getpid()
        wait_to_be_stopped()
    while not all(state_of(pids[other]) == "S" for other in range(len(pids)) if other != 1):
        os.sched_yield()
    return action()


class KeywordOnlyError(Exception):
    """An exception that plain pickle cannot rebuild: it takes two arguments that are not in `args`."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")
        self.code = code
        self.detail = detail


def raises_value_error():
    raise ValueError("the batch is bad")  # THE-LINE


def raises_keyword_only_error():
    raise KeywordOnlyError(7, detail="two arguments")


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


def recurses():
    recurses()


def exits_with_3():
    sys.exit(3)


def exits_with_256():
    sys.exit(256)


def exits_with_text():
    sys.exit("cannot go on")


def exits_with_0():
    sys.exit(0)


def exits_with_none():
    sys.exit()


def calls_os_exit_with_7():
    os._exit(7)


def calls_os_exit_with_0():
    os._exit(0)


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def is_terminated():
    os.kill(os.getpid(), signal.SIGTERM)


def crashes():
    ctypes.string_at(0)


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


def leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="endless prefetcher").start()
    return rank()


def ignores_sigterm(barrier):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    barrier.wait()
    if rank() == 1:
        raise ValueError("the batch is bad")
    wait_to_be_stopped()


def fails_beside_a_suspended_rank(barrier, suspended_pid):
    barrier.wait()
    if rank() == 1:
        while state_of(suspended_pid.value) != "T":
            os.sched_yield()
        raise ValueError("the batch is bad")
    if rank() == 0:
        suspended_pid.value = os.getpid()
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_to_be_stopped()


def state_of(pid):
    if not pid:
        return None
    with open(f"/proc/{pid}/stat") as text:
        return text.read().rpartition(")")[2].split()[0]


def starts_a_helper(barrier, pids):
    """Start a helper process in the process group of each rank. Then rank 1 is killed."""
    helper = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    pids[rank()] = helper.pid
    barrier.wait()
    if rank() == 1:
        is_killed()
    wait_to_be_stopped()


def forks_and_both_return():
    return os.fork() == 0


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


class RefusesAttributesError(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)


class ExitsInStrError(Exception):
    def __str__(self):
        return str(sys.exit(0))


class RaisesInStrError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class ExitsWhenPickledError(Exception):
    def __reduce__(self):
        sys.exit(0)


class HidesItsArgumentsError(Exception):
    @property
    def args(self):
        raise RuntimeError("no arguments")


class TruthlessCode:
    def __bool__(self):
        raise ValueError("ambiguous")


def with_invalid_notes(error):
    error.__notes__ = 5
    return error


def nested_group(depth):
    error = ValueError("innermost")
    for _ in range(depth):
        error = ExceptionGroup("one", [error])
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


def waits_at_barrier(barrier):
    barrier.wait()


def only_rank_0_raises():
    if rank() == 0:
        raise ValueError("the batch is bad")
    wait_to_be_stopped()


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


def fails_while_rank_0_sleeps(wait, pid):
    """Raise on rank 1 once rank 0 has stored its pid and sleeps."""
    if rank() == 0:
        return wait(pid)
    while state_of(pid.value) != "S":
        os.sched_yield()
    raise ValueError("the batch is bad")


def shares_its_pid_and_waits(pid):
    pid.value = os.getpid()
    wait_to_be_stopped()


def forks_a_child_that_crashes():
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV


def forks_a_child_that_crashes_and_waits(pid):
    forks_a_child_that_crashes()
    shares_its_pid_and_waits(pid)


def forks_a_child_that_crashes_and_is_killed():
    forks_a_child_that_crashes()
    is_killed()


def dumps_its_own_stack():
    signal.raise_signal(signal.SIGRTMAX - 3)
    atexit.register(signal.raise_signal, signal.SIGRTMAX - 3)
    return rank()


def waits_with_120_threads(pid):
    for _ in range(120):
        threading.Thread(target=wait_in_a_thread, daemon=True).start()
    shares_its_pid_and_waits(pid)


def pauses_once(pid):
    pid.value = os.getpid()
    signal.pause()


def holds_the_gil(pid):
    pid.value = os.getpid()
    ctypes.PyDLL(None).usleep(60_000_000)


def wait_in_a_thread():
    threading.Event().wait()


def waits_with_a_thread(pid):
    threading.Thread(target=wait_in_a_thread, daemon=True).start()
    shares_its_pid_and_waits(pid)


def recurses_then_waits(depth, barrier):
    if depth:
        recurses_then_waits(depth - 1, barrier)
    barrier.wait()
    wait_to_be_stopped()


def fails_beside_a_deep_stack(barrier, failed_at):
    if rank() == 0:
        recurses_then_waits(200, barrier)
    barrier.wait()
    failed_at.value = time.monotonic()
    raise ValueError("the batch is bad")


def replaces_descriptors_and_waits(folder):
    if rank() == 0:
        os.closerange(3, 4096)
        for _ in range(60):
            os.open(f"{folder}/0", os.O_RDWR | os.O_CREAT)
        open(f"{folder}/1", "w").close()
        wait_to_be_stopped()
    while not os.path.exists(f"{folder}/1"):
        os.sched_yield()
    raise ValueError("the batch is bad")


PROGRAM_THAT_EXITS_AT_SIGTERM = """
import signal, sys
def end(*_):
    with open(sys.argv[1], "w") as file:
        file.write("by SIGTERM")
    sys.exit()
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").close()
while True:
    signal.pause()
"""


def execs_a_program_that_exits_at_sigterm(path):
    if rank() == 0:
        os.execv(sys.executable, [sys.executable, "-S", "-c", PROGRAM_THAT_EXITS_AT_SIGTERM, path])
    while not os.path.exists(path):
        os.sched_yield()
    raise ValueError("the batch is bad")


class ResumesTheWatcherError(Exception):
    """An exception that resumes the watcher when it is pickled, which is after its failure was reported."""

    def __reduce__(self):
        os.kill(os.getppid(), signal.SIGCONT)
        return type(self), self.args


def two_fail_while_the_watcher_is_suspended(order, pids, turn):
    """Fail on ranks 0 and 2 while the watcher is suspended. The last event resumes the watcher."""
    me, watcher = rank(), os.getppid()
    pids[me] = os.getpid()
    while not all(pids):
        os.sched_yield()
    if me == 1:
        os.kill(watcher, signal.SIGSTOP)
        while state_of(watcher) != "T":
            os.sched_yield()
        turn.value = 1
        if order == "exception first":
            while state_of(pids[2]) != "Z":
                os.sched_yield()
            os.kill(watcher, signal.SIGCONT)
        wait_to_be_stopped()
    while not turn.value:
        os.sched_yield()
    if me == 2:
        while order == "exception first" and turn.value != 2:
            os.sched_yield()
        is_killed()
    while order == "death first" and state_of(pids[2]) != "Z":
        os.sched_yield()
    raise (ResumesTheWatcherError if order == "death first" else LetsRank2DieWhenPickledError(turn))


class LetsRank2DieWhenPickledError(Exception):
    def __init__(self, turn):
        super().__init__("first")
        self.turn = turn

    def __reduce__(self):
        self.turn.value = 2
        return ValueError, ()


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


def loses_a_connection_to_another_program(barrier, has_failed):
    """Raise BrokenPipeError on rank 0: it loses a connection to a process that is not a rank. Then rank 1 fails as a consequence."""
    global _has_failed
    _has_failed = has_failed
    barrier.wait()
    if rank() == 0:
        raise ReportedBrokenPipeError
    has_failed.wait()
    raise KeyError("no shard of rank 0")


def three_fail_while_the_watcher_is_suspended(pids):
    """End rank 2, then rank 1, then raise on rank 0, while the watcher is suspended. Then resume the watcher."""
    me, watcher = rank(), os.getppid()
    pids[me] = os.getpid()
    while not all(pids):
        os.sched_yield()
    if me == 2:
        os.kill(watcher, signal.SIGSTOP)
        while state_of(watcher) != "T":
            os.sched_yield()
        os._exit(3)
    while state_of(pids[2]) != "Z":
        os.sched_yield()
    if me == 1:
        os._exit(4)
    while state_of(pids[1]) != "Z":
        os.sched_yield()
    raise ResumesTheWatcherError


def sends_heartbeats_except_rank_1(saboteur, barrier):
    """Send a heartbeat from each rank. Then rank 1 calls `saboteur`, and the others go on with heartbeats."""
    mpwatch.heartbeat()
    barrier.wait()
    if rank() == 1:
        saboteur()
    while True:
        mpwatch.heartbeat()
        time.sleep(0.01)


def stops_its_heartbeats():
    wait_to_be_stopped()


def stops_its_heartbeats_and_holds_the_gil():
    ctypes.PyDLL(None).usleep(60_000_000)


def suspends_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def sends_heartbeats_from_a_fork():
    mpwatch.heartbeat()
    if os.fork() == 0:
        while True:
            mpwatch.heartbeat()
            time.sleep(0.01)
    wait_to_be_stopped()


def sends_heartbeats_until_sigusr1():
    received = []
    signal.signal(signal.SIGUSR1, lambda *_: received.append(True))
    mpwatch.heartbeat()
    os.write(1, f"{os.getpid()}\n".encode())
    while not received:
        mpwatch.heartbeat()
        time.sleep(0.01)
    return True


def ends_after_the_host_acted(at_work, go, end):
    """Call `end` on rank 1 after the host program has done its part. If `end` returns, call it on the other ranks, too.

    This uses semaphores, since a rank that is stopped while it leaves a barrier would leave the barrier broken for the host.
    """
    at_work.release()
    if end is is_killed_beside_a_helper:
        os.fork() or wait_to_be_stopped()
    go.acquire()
    if rank() == 1 or end in (rank, returns_1_mib):
        return end()
    return wait_to_be_stopped()


def keeps_waiting():
    wait_to_be_stopped()


def is_killed_beside_a_helper():
    is_killed()


def call_on_rank_0(action):
    if rank() == 0 or action is rank:
        return action()
    return wait_to_be_stopped()


def interrupts_its_watcher():
    if rank() == 0:
        os.kill(os.getppid(), signal.SIGINT)
    wait_to_be_stopped()


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


def terminates_its_watcher():
    if rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    wait_to_be_stopped()


def waits_at_barrier_twice(barrier):
    barrier.wait()
    barrier.wait()
    return rank()


def waits_at_barrier_twice_and_is_killed(barrier):
    waits_at_barrier_twice(barrier)
    is_killed()


class FailsToPickleWhenThePeerIsDead:
    def __reduce__(self):
        _has_failed.set()
        while os.path.exists(f"/proc/{_peer}") and state_of(_peer) != "Z":
            os.sched_yield()
        raise ValueError("cannot be pickled")


def returns_an_unpicklable_value_slowly(pids, pickling_began):
    global _has_failed, _peer
    me = rank()
    pids[me] = os.getpid()
    while not all(pids):
        os.sched_yield()
    _has_failed, _peer = pickling_began, pids[1]
    if me == 0:
        return FailsToPickleWhenThePeerIsDead()
    pickling_began.wait()
    return is_killed()


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


def closes_descriptors_and_returns(value):
    os.closerange(3, 4096)
    return value


def returns_1_mib():
    return bytes(1 << 20)


def rank_0_returns_1_mib_then_rank_1_fails():
    """Return a large value on rank 0. Raise on rank 1 once the watcher has received that value."""
    if rank() == 0:
        return returns_1_mib()
    while "mpwatch-value" not in Path(f"/proc/{os.getppid()}/maps").read_text():
        os.sched_yield()
    raise ValueError("the batch is bad")


def returns_1_mib_without_free_descriptors():
    _open_descriptors.extend(_open_descriptors_until_none_is_free())
    return returns_1_mib()


_open_descriptors = []


def _open_descriptors_until_none_is_free():
    with contextlib.suppress(OSError):
        while True:
            yield os.open(os.devnull, os.O_RDONLY)


def returns_1_mib_under_a_file_size_limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    return returns_1_mib()


def answers_with_invalid_files(what):
    """Send these descriptors to the watcher instead of the file of a return value, then end at once."""
    from mpwatch.wire.messages import MessageKind, encode_frame
    from mpwatch.wire.pickling.pickle_buffers import MAGIC, TRAILER

    empty, foreign, truncated = (os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("empty", "foreign", "truncated"))
    os.write(foreign, bytes(100))
    os.write(truncated, TRAILER.pack(1000, MAGIC))
    pipe = os.pipe()[0]
    fds = {
        "nothing": [],
        "a pipe": [pipe],
        "two pipes": [pipe, pipe],
        "an empty file": [empty],
        "a file of something else": [foreign],
        "a truncated file": [truncated],
    }[what]
    with socket.socket(fileno=os.dup(multiprocessing.current_process().launch_info.channel_fd)) as channel:
        socket.send_fds(
            channel, [encode_frame(MessageKind.EXIT_BLOCKED if what == "two pipes" else MessageKind.RETURNED)], fds
        )
    os._exit(0)
