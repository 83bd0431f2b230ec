"""What goes wrong in ranks, by name. Functions of an importable module: they go to the ranks by reference."""

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


def only_rank_1(what, barrier, *args):
    """Rank 1 does it once all are at work; the others wait until they are stopped."""
    barrier.wait()
    if rank() == 1:
        return what(*args)
    return wait_to_be_stopped()


def only_rank_1_when_the_others_sleep(what, pids):
    """The others have written down their pids, and then begun to wait."""
    me = rank()
    if me != 1:
        pids[me] = os.getpid()
        wait_to_be_stopped()
    while not all(state_of(pids[other]) == "S" for other in range(len(pids)) if other != 1):
        os.sched_yield()
    return what()


class PickyError(Exception):
    """Plain pickle cannot rebuild it: two arguments that it does not keep in args."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")
        self.code = code
        self.detail = detail


def raises_value_error():
    raise ValueError("the batch is bad")  # THE-LINE


def raises_picky():
    raise PickyError(7, detail="two arguments")


def raises_from_cause():
    try:
        {}["lost key"]
    except KeyError as error:
        late = RuntimeError("while loading")
        late.add_note("shard 17")
        raise late from error


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


def vanishes_with_7():
    os._exit(7)


def vanishes_with_0():
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


def executes_an_unknown_instruction():
    signal.raise_signal(signal.SIGILL)


def returns_a_lock():
    return {"model": [1, threading.Lock()]}


def returns_what_cannot_be_rebuilt():
    return Unbuildable()


def _refuse():
    raise LookupError("not here")


class Unbuildable:
    def __reduce__(self):
        return _refuse, ()


def executes_another_program():
    os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(9)"])


def closes_descriptors_and_raises():
    os.closerange(3, 4096)
    raise ValueError("the batch is bad")


def replaces_descriptors_and_returns():
    """Closes all, and opens files in their place: nothing may be written into them."""
    os.closerange(3, 4096)
    for number in range(60):
        os.memfd_create(f"innocent-{number}")
    atexit.register(_check_that_they_are_empty)
    return rank()


def _check_that_they_are_empty():
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if "innocent" in os.readlink(path) and os.stat(path).st_size:
            os.kill(os.getpid(), signal.SIGKILL)  # the watcher says so in a warning


def leaves_a_thread_and_raises():
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("the batch is bad")


def leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="forgotten prefetcher").start()
    return rank()


def ignores_sigterm(barrier):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    barrier.wait()
    if rank() == 1:
        raise ValueError("the batch is bad")
    wait_to_be_stopped()


def stops_itself(barrier, stopped_pid):
    barrier.wait()
    if rank() == 1:
        while state_of(stopped_pid.value) != "T":
            os.sched_yield()
        raise ValueError("the batch is bad")
    if rank() == 0:
        stopped_pid.value = os.getpid()
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_to_be_stopped()


def state_of(pid):
    if not pid:
        return None
    with open(f"/proc/{pid}/stat") as text:
        return text.read().rpartition(")")[2].split()[0]


def starts_a_helper(barrier, pids):
    """Each rank has a helper in its process group; then rank 1 is killed."""
    helper = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    pids[rank()] = helper.pid
    barrier.wait()
    if rank() == 1:
        is_killed()
    wait_to_be_stopped()


def forks_and_both_return():
    return os.fork() == 0


def forks_a_child_that_waits(pid_of_child, barrier):
    """A forked copy holds every descriptor of the rank, its channel among them; then the rank is killed."""
    if rank() == 1:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.alarm(60)
            signal.pause()
            os._exit(0)
        pid_of_child.value = pid
    return only_rank_1(is_killed, barrier)


def complains_before_its_peer_fails(barrier, has_complained):
    """As gloo does it: the victims speak first, and the cause is heard of later."""
    barrier.wait()
    if rank() == 1:
        has_complained.wait()
        raise ValueError("the batch is bad")
    if rank() == 0:
        has_complained.set()
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    wait_to_be_stopped()


def complains_of_a_peer():
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


def time_of_failure(barrier, failed_at):
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


class ExitsAsTextError(Exception):
    def __str__(self):
        return str(sys.exit(0))


class RaisesAsTextError(Exception):
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


def with_notes_that_are_none(error):
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


class SpeaksForItself(str):
    __slots__ = ()

    def __reduce_ex__(self, _):
        return os._exit, (3,)


def with_a_note_of_its_own():
    error = ValueError("x")
    error.add_note(SpeaksForItself("note"))
    return error


STRANGE = {
    "own traceback": lambda: OwnTracebackError("x"),
    "own everything": lambda: OwnEverythingError("x"),
    "own note": with_a_note_of_its_own,
    "frozen": lambda: FrozenError(3),
    "refuses attributes": lambda: RefusesAttributesError("x"),
    "exits as text": lambda: ExitsAsTextError("x"),
    "raises as text": lambda: RaisesAsTextError("x"),
    "exits when pickled": lambda: ExitsWhenPickledError("x"),
    "hides its arguments": lambda: HidesItsArgumentsError("x"),
    "odd notes": lambda: with_notes_that_are_none(ValueError("x")),
    "deep group": lambda: nested_group(2200),
    "wide group": lambda: ExceptionGroup("many", [ExceptionGroup("one", [ValueError(n)]) for n in range(1500)]),
}


def raises_something_strange(name):
    error = STRANGE[name]()
    raise error


def raises_without_a_line():
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


def returns_what_exits_when_pickled():
    return ExitsWhenPickledError("x")


def closes_descriptors_and_returns_much():
    os.closerange(3, 4096)
    return bytes(2 << 20)


def waits_at(barrier):
    barrier.wait()


def only_rank_0_raises():
    if rank() == 0:
        raise ValueError("the batch is bad")
    wait_to_be_stopped()


def ends_at_sigterm(ending, barrier=None):
    """As a training loop that saves and leaves when a scheduler tells it to."""

    def leave(*_):
        os.write(1, b"told to stop\n")
        if ending == "raise":
            raise InterruptedError("told to stop")
        sys.exit(int(ending.split()[1]))

    signal.signal(signal.SIGTERM, leave)
    if barrier is not None:
        barrier.wait()
        if rank() == 1:
            raise ValueError("the batch is bad")
    wait_to_be_stopped()


class SlowToTellError(Exception):
    """Has no text before another rank's failure has been told."""

    def __str__(self):
        _has_failed.set()
        _other_has_told.wait()
        return "slow"


class TellsThatItIsToldError(Exception):
    """It is pickled after it has been told."""

    def __reduce__(self):
        _other_has_told.set()
        return TellsThatItIsToldError, ()


def fails_first_but_is_slow_to_tell(barrier, has_failed, other_has_told):
    global _has_failed, _other_has_told
    _has_failed, _other_has_told = has_failed, other_has_told
    barrier.wait()
    if rank() == 0:
        raise SlowToTellError
    if rank() == 1:
        has_failed.wait()
        raise TellsThatItIsToldError
    wait_to_be_stopped()


def fails_beside(what, pid):
    """Rank 1 fails once rank 0 has said that it now begins to sleep, and does."""
    if rank() == 0:
        return what(pid)
    while state_of(pid.value) != "S":
        os.sched_yield()
    raise ValueError("the batch is bad")


def waits_beside(pid):
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
    waits_beside(pid)


def forks_a_child_that_crashes_and_is_killed():
    forks_a_child_that_crashes()
    is_killed()


def dumps_by_itself():
    signal.raise_signal(signal.SIGRTMAX - 3)
    atexit.register(signal.raise_signal, signal.SIGRTMAX - 3)
    return rank()


def waits_with_very_many_threads(pid):
    for _ in range(120):
        threading.Thread(target=wait_in_a_thread, daemon=True).start()
    waits_beside(pid)


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
    waits_beside(pid)


def descends(depth, barrier):
    if depth:
        descends(depth - 1, barrier)
    barrier.wait()
    wait_to_be_stopped()


def fails_beside_a_deep_stack(barrier, failed_at):
    if rank() == 0:
        descends(200, barrier)
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


PROGRAM = """
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


def becomes_a_program_that_ends_well(path):
    if rank() == 0:
        os.execv(sys.executable, [sys.executable, "-S", "-c", PROGRAM, path])
    while not os.path.exists(path):
        os.sched_yield()
    raise ValueError("the batch is bad")


class WakesTheWatcherError(Exception):
    """When it has been told, and is pickled."""

    def __reduce__(self):
        os.kill(os.getppid(), signal.SIGCONT)
        return type(self), self.args


def suspends_the_watcher(order, pids, turn):
    """Ranks 0 and 2 fail, one because of the other, while the watcher does not look; the last wakes it."""
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
    raise (WakesTheWatcherError if order == "death first" else LetsTheOtherDieError(turn))


class LetsTheOtherDieError(Exception):
    def __init__(self, turn):
        super().__init__("first")
        self.turn = turn

    def __reduce__(self):
        self.turn.value = 2
        return ValueError, ()


class NeverTellsError(Exception):
    def __str__(self):
        return str(wait_to_be_stopped())


class ExitsAsItsTextIsMadeError(Exception):
    def __str__(self):
        return str(os._exit(5))


class ExitsWhenRebuiltError(Exception):
    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")

    def __reduce__(self):
        return os._exit, (5,)


class NeverRebuiltError(Exception):
    def __reduce__(self):
        return wait_to_be_stopped, ()


def raises_what_never_tells():
    raise NeverTellsError


def raises_what_exits_as_text():
    raise ExitsAsItsTextIsMadeError


def raises_what_exits_when_rebuilt():
    raise ExitsWhenRebuiltError(7, detail="two arguments")


def raises_what_never_comes_back():
    raise NeverRebuiltError("the batch is bad")


class InterruptsItsTellingError(Exception):
    """With a thread that takes the signals which the main thread might have blocked."""

    def __reduce__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        return type(self), self.args


def raises_what_is_interrupted_as_it_is_told():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    raise InterruptsItsTellingError("the batch is bad")


def forks_and_the_copy_raises():
    pid = os.fork()
    if pid == 0:
        raise ValueError("the batch is bad")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def takes_all_descriptors_and_raises():
    taken = []
    while True:
        taken.append(open(os.devnull))


def rank_0_raises_what_the_others_lack():
    if rank() == 0:
        raise PickyError(7, detail="two arguments")
    wait_to_be_stopped()


class TooLateError(Exception):
    pass


def raise_too_late(*_):
    raise TooLateError


class WokenAsItIsToldError(Exception):
    """A timer with a handler that raises goes off while it is told."""

    def __str__(self):
        signal.raise_signal(signal.SIGALRM)
        return "the batch is bad"


def is_woken_as_its_failure_is_told():
    signal.signal(signal.SIGALRM, raise_too_late)
    raise WokenAsItIsToldError


def loses_its_peer(barrier, how):
    """Rank 1 dies, and the others say so in words of their own as soon as its end of the line is closed."""
    if rank() == 1:
        path = f"\0mpwatch-test-{os.getppid()}"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            barrier.wait()
            peers = [server.accept()[0] for _ in range(2)]
            for peer in peers:
                peer.sendall(b"x")
            how()
    barrier.wait()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(f"\0mpwatch-test-{os.getppid()}")
        line.recv(1)
        line.recv(1)
    raise RuntimeError("lost my peer")


class ToldBrokenPipeError(BrokenPipeError):
    def __str__(self):
        _has_failed.set()
        return "broken"


def breaks_a_connection_of_its_own(barrier, has_failed):
    """Rank 0 loses somebody who is no rank, and rank 1 fails because of that, later."""
    global _has_failed
    _has_failed = has_failed
    barrier.wait()
    if rank() == 0:
        raise ToldBrokenPipeError
    has_failed.wait()
    raise KeyError("no shard of rank 0")


def three_fail_while_the_watcher_does_not_look(pids):
    """Rank 2 dies, then rank 1, then rank 0 raises; then the watcher may look."""
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
    raise WakesTheWatcherError


def beats_unless_rank_1(saboteur, barrier):
    """Rank 1 has beaten, and then does something else; the others go on."""
    mpwatch.heartbeat()
    barrier.wait()
    if rank() == 1:
        saboteur()
    while True:
        mpwatch.heartbeat()
        time.sleep(0.01)


def falls_silent():
    wait_to_be_stopped()


def falls_silent_and_holds_the_gil():
    ctypes.PyDLL(None).usleep(60_000_000)


def suspends_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def has_its_heart_in_a_fork():
    mpwatch.heartbeat()
    if os.fork() == 0:
        while True:
            mpwatch.heartbeat()
            time.sleep(0.01)
    wait_to_be_stopped()


def beats_until_told():
    told = []
    signal.signal(signal.SIGUSR1, lambda *_: told.append(True))
    mpwatch.heartbeat()
    os.write(1, f"{os.getpid()}\n".encode())
    while not told:
        mpwatch.heartbeat()
        time.sleep(0.01)
    return True


def ends_in_two_steps(at_work, go, end):
    """All are at work; then something happens in the host; then rank 1 ends so. The others do it only if it returns.

    With semaphores: a rank that is stopped while it leaves a barrier would take the host's end of that with it.
    """
    at_work.release()
    if end is is_killed_beside_a_helper:
        os.fork() or wait_to_be_stopped()
    go.acquire()
    if rank() == 1 or end in (rank, returns_much):
        return end()
    return wait_to_be_stopped()


def outlasts():
    wait_to_be_stopped()


def is_killed_beside_a_helper():
    is_killed()


def only_rank_0(what):
    if rank() == 0 or what is rank:
        return what()
    return wait_to_be_stopped()


def interrupts_its_watcher():
    if rank() == 0:
        os.kill(os.getppid(), signal.SIGINT)
    wait_to_be_stopped()


def does_nothing():
    pass


def change_signals(handler):
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGRTMAX - 3}:
        signal.signal(number, handler)


def ignores_all_signals():
    change_signals(signal.SIG_IGN)


def handles_all_signals_by_doing_nothing():
    change_signals(lambda *_: None)


def blocks_all_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def never_ends_at_exit():
    atexit.register(wait_to_be_stopped)


def never_ends_at_exit_and_blocks_all_signals():
    blocks_all_signals()
    never_ends_at_exit()


def stops_itself_at_exit():
    atexit.register(os.kill, os.getpid(), signal.SIGSTOP)


def has_a_thread_that_does_not_end():
    threading.Thread(target=wait_in_a_thread, name="endless").start()


def closes_all_descriptors():
    os.closerange(0, 4096)


def closes_its_stderr():
    sys.stderr.close()
    with contextlib.suppress(OSError):
        os.close(2)


def joins_the_watchers_group():
    os.setpgid(0, os.getpgid(os.getppid()))


def tries_to_lead_a_session():
    with contextlib.suppress(PermissionError):  # it leads a group already
        os.setsid()


def has_a_helper_that_ignores_all_signals():
    read, write = os.pipe()
    if os.fork() == 0:
        ignores_all_signals()
        os.write(write, b"x")
        wait_to_be_stopped()
    os.read(read, 1)


def stops_itself_for_good():
    os.kill(os.getpid(), signal.SIGSTOP)
    wait_to_be_stopped()


def is_stuck_in_c():
    ctypes.PyDLL(None).usleep(600_000_000)


def is_stuck_in_c_and_handles_sigterm():
    signal.signal(signal.SIGTERM, lambda *_: None)
    is_stuck_in_c()


def becomes_a_program_that_ignores_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.execv("/bin/sleep", ["sleep", "600"])


def beside_one_that_resists(prepare, ending, pid, at):
    """Rank 0 resists. It ends as told, or its sibling fails once it has begun to wait; when that was is put down."""
    if rank() == 0:
        prepare()
        pid.value = os.getpid()
        return ending(at)
    while not pid.value:
        os.sched_yield()
    if ending is returns:
        return 1
    if ending in (raises_at, dies_at):
        return wait_to_be_stopped()
    while not rests(pid.value, ending.waiting):
        os.sched_yield()
    return raises_at(at)


def rests(pid, waiting):
    if waiting is becomes_a_program_that_ignores_sigterm:
        with open(f"/proc/{pid}/comm") as text:
            return text.read() == "sleep\n" and state_of(pid) == "S"
    return state_of(pid) == ("T" if waiting is stops_itself_for_good else "S")


def raises_at(at):
    at.value = time.monotonic()
    raise ValueError("the batch is bad")


def dies_at(at):
    at.value = time.monotonic()
    is_killed()


def returns(at):
    at.value = time.monotonic()
    return 0


class SiblingFails:
    """While this one waits in such a way."""

    def __init__(self, waiting=wait_to_be_stopped):
        self.waiting = waiting

    def __call__(self, at):
        self.waiting()


def half_a_message():
    """A header that says that much will follow, and some of it."""
    from mpwatch.wire.messages import MessageKind, frame

    return frame(MessageKind.RETURNED, bytes(1 << 20))[: 1 << 10]


def dies_half_way_through_a_message(barrier, pid, leaves_group, end):
    """A forked helper has the line open all the same."""
    if rank() == 1:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            if leaves_group:
                os.setsid()
            os.write(write, b"x")
            signal.alarm(60)
            signal.pause()
            os._exit(0)
        os.read(read, 1)
        pid.value = child
    barrier.wait()
    if rank() == 1:
        os.write(multiprocessing.current_process().launch_info.channel_fd, half_a_message())
        end()
    wait_to_be_stopped()


def joins_and_freezes(group):
    with open(f"{group}/cgroup.procs", "w") as procs:
        procs.write(str(os.getpid()))
    with open(f"{group}/freezer.state", "w") as state:
        state.write("FROZEN")


def fails_beside_a_frozen_rank(group, pid, at):
    if rank() == 0:
        pid.value = os.getpid()
        joins_and_freezes(group)
        wait_to_be_stopped()
    while not is_frozen(group):
        os.sched_yield()
    raises_at(at)


def is_frozen(group):
    with open(f"{group}/freezer.state") as state:
        return state.read() == "FROZEN\n"


PTRACE_SEIZE = 0x4206
PTRACE_CONT = 7


def is_held_by_a_debugger(tracer, looks):
    """One that has left the rank's group, and does or does not look at what becomes of the rank."""
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
        while looks and os.WIFSTOPPED(status := os.waitpid(pid, 0)[1]):
            libc.ptrace(PTRACE_CONT, pid, None, os.WSTOPSIG(status))
        signal.pause()
    os.read(read, 1)


def fails_beside_one_that_is_held(tracer, looks, ending, at):
    if rank() == 0:
        is_held_by_a_debugger(tracer, looks)
        return ending(at) if ending is dies_at else wait_to_be_stopped()
    while not tracer.value:
        os.sched_yield()
    return wait_to_be_stopped() if ending is dies_at else raises_at(at)


def terminates_its_watcher():
    if rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    wait_to_be_stopped()


def waits_twice_at(barrier):
    barrier.wait()
    barrier.wait()
    return rank()


def waits_twice_at_and_is_killed(barrier):
    waits_twice_at(barrier)
    is_killed()


class CannotBePickledBeforeThePeerDies:
    def __reduce__(self):
        _has_failed.set()
        while os.path.exists(f"/proc/{_peer}") and state_of(_peer) != "Z":
            os.sched_yield()
        raise ValueError("there is no form of it")


def returns_what_cannot_be_sent_and_takes_its_time(pids, begun):
    global _has_failed, _peer
    me = rank()
    pids[me] = os.getpid()
    while not all(pids):
        os.sched_yield()
    _has_failed, _peer = begun, pids[1]
    if me == 0:
        return CannotBePickledBeforeThePeerDies()
    begun.wait()
    return is_killed()


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


def closes_descriptors_and_returns(value):
    os.closerange(3, 4096)
    return value


def returns_much():
    return bytes(1 << 20)


def returns_much_but_rank_1_fails():
    """When the watcher has the value of rank 0."""
    if rank() == 0:
        return returns_much()
    while "mpwatch-value" not in Path(f"/proc/{os.getppid()}/maps").read_text():
        os.sched_yield()
    raise ValueError("the batch is bad")


def returns_much_without_descriptors():
    _kept.extend(_until_there_are_no_more())
    return returns_much()


_kept = []


def _until_there_are_no_more():
    with contextlib.suppress(OSError):
        while True:
            yield os.open(os.devnull, os.O_RDONLY)


def returns_much_under_a_limit_of_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    return returns_much()


def answers_with(what):
    """In the place of its value's file, and at once ends."""
    from mpwatch.wire.messages import MessageKind, frame
    from mpwatch.wire.pickling.pickle_buffers import END, MARK

    empty, strange, hollow = (os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("empty", "strange", "hollow"))
    os.write(strange, bytes(100))
    os.write(hollow, END.pack(1000, MARK))
    pipe = os.pipe()[0]
    fds = {
        "nothing": [],
        "a pipe": [pipe],
        "two pipes": [pipe, pipe],
        "an empty file": [empty],
        "a file of something else": [strange],
        "a file that promises what is not there": [hollow],
    }[what]
    with socket.socket(fileno=os.dup(multiprocessing.current_process().launch_info.channel_fd)) as line:
        socket.send_fds(line, [frame(MessageKind.EXIT_BLOCKED if what == "two pipes" else MessageKind.RETURNED)], fds)
    os._exit(0)
