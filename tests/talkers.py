"""What ranks print, in every way that there is."""

import atexit
import ctypes
import io
import os
import signal
import subprocess
import sys
import threading

import mpwatch


def rank():
    return mpwatch.current_worker().rank


def says(out="", err=""):
    """With the rank in it; without newlines of its own."""
    sys.stdout.write(out.format(rank()))
    sys.stderr.write(err.format(rank()))


def says_hello():
    says("out {}\n", "err {}\n")


def says_hello_in_every_way():
    """The same line by Python, by C, by a program that it starts, and by the descriptor."""
    print("python")
    libc = ctypes.CDLL(None)
    libc.puts(b"c")
    libc.printf(b"c without an end, ")
    libc.fflush(None)
    subprocess.run(["echo", "program"], check=True)
    os.write(1, b"\xff descriptor\n")


def says_while_c_reads():
    """Another thread reads a stream of C, to which nothing ever comes, and has its lock."""
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    libc.getc.argtypes = libc.ftrylockfile.argtypes = libc.funlockfile.argtypes = (ctypes.c_void_p,)
    reads, _ = os.pipe()
    stream = libc.fdopen(reads, b"r")
    threading.Thread(target=libc.getc, args=(stream,), daemon=True).start()
    while libc.ftrylockfile(stream) == 0:
        libc.funlockfile(stream)
    libc.printf(b"said")


def has_a_stdout_that_exits():
    class Exits(io.StringIO):
        def flush(self):
            raise SystemExit(3)

    sys.stdout = Exits()
    return rank()


def says_in_c(text):
    ctypes.CDLL(None).printf(text)


def says_hello_when_interrupted(is_at_work):
    try:
        is_at_work.set()
        threading.Event().wait()
    except KeyboardInterrupt:
        says_hello()


def counts_at_the_end(lines):
    """Of its interpreter."""
    atexit.register(counts, lines)


def counts(lines, width=100):
    """Lines that can be told apart, as fast as it can."""
    me = rank()
    block = 100
    for first in range(0, lines, block):
        numbers = range(first, min(first + block, lines))
        sys.stdout.write("".join(f"{me} {n}".ljust(width - 1, ".") + "\n" for n in numbers))
    return lines


def counts_and_marks(lines, written):
    """A line at a time, and how many it has written is there for all to see."""
    for n in range(lines):
        os.write(1, f"{n}".ljust(999, ".").encode() + b"\n")
        written.value = n + 1


def speaks_and_is_killed(number=signal.SIGKILL):
    print("last words")
    print("without an end", end="", flush=True)
    sys.stderr.write("oh\nno\n")
    os.kill(os.getpid(), number)


def speaks_in_c_and_crashes():
    ctypes.CDLL(None).puts(b"last words of c")
    ctypes.string_at(0)


def only_rank_1_fails(barrier, what, *args):
    says("", "rank {} works\n")
    barrier.wait()
    if rank() == 1:
        what(*args)
    threading.Event().wait()


def gives_up_as_nccl_does(barrier):
    """What ProcessGroupNCCL writes, and how it ends the process; the other rank is busy with something else."""
    os.write(2, b"terminate called after throwing an instance of 'c10::DistBackendError'\n")
    os.write(2, b"  what(): [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)\n")
    me = rank()
    barrier.wait()
    if me == 0:
        os.abort()
    while True:
        me += 1


def complains_and_raises():
    sys.stderr.write("a warning\n" * 3 + "10%\r20%\n")
    raise ValueError("bad")


def leaves_a_daemon(pids):
    """A process that holds stdout and stderr, in a session of its own, so that nobody stops it with the rank."""
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    pids[rank()] = daemon.pid
    daemon.returncode = 0  # it is not to be waited for
    print("daemon started")


def fails_in_its_first_life():
    me = mpwatch.current_worker()
    print("life", me.restart_count)
    if me.rank == 1 and not me.restart_count:
        raise ValueError("bad")


def rank_0_says_later(event, text):
    """By a thread, when the call may have returned."""

    def wait_and_say():
        event.wait()
        print(text)

    if rank() == 0:
        threading.Thread(target=wait_and_say, daemon=True).start()


def takes_its_time_for_a_line(other_lives_again):
    """Rank 1 fails, and is started again, while rank 0 is in the midst of a line."""
    me = mpwatch.current_worker()
    if me.rank == 0:
        print("begun, ", end="", flush=True)
        other_lives_again.wait()
        print("and ended")
    elif me.restart_count:
        other_lives_again.wait()
    else:
        raise ValueError("bad")


def is_bars(steps):
    from tqdm import tqdm

    for _ in tqdm(range(steps), desc=f"bar {rank()}", mininterval=0):
        pass
