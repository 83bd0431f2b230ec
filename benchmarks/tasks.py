"""The tasks of ranks. Every launcher finds them by name. The import of this module costs a rank almost nothing.

A rank reads its number from the variable RANK. For launchers that do not set it, `call_with_rank` does. A rank writes each
figure to a file in the folder of the measurement. Times are of CLOCK_MONOTONIC, which all processes share.
"""

import os
import signal
import time

FAILING_RANK = 1
MEASURING_RANK = 0
ELEMENTS = 16_000_000  # of 4 bytes
PERIOD = 1000  # the numbers of an argument are 0, 1, ..., 999, 0, 1, ...
SLEEP_SECONDS = 600.0
LINES_PER_BLOCK = 1000  # each block of a rank has the same lines
LINE = 100  # bytes, with the newline
CALLS = 200_000
SETTLE_SECONDS = 2.0  # after this time the launch is complete and all ranks are in the function


def call_with_rank(rank, task, *args):
    os.environ["RANK"] = str(rank)
    return task(*args)


def keep_barrier(barrier):
    global _barrier
    _barrier = barrier


def call_together(task, *args):
    """Wait for all ranks first: otherwise a pool gives short calls of several ranks to one process, and starts fewer."""
    _barrier.wait()
    return task(*args)


def do_nothing(*_):
    pass


def enter(folder):
    write_figure(folder, "entered", time.monotonic())


def enter_with_torch(folder):
    import torch  # noqa: F401

    enter(folder)


def receive(folder, array):
    """Time the start of the function and the read of the array, since the bytes may arrive only when they are read."""
    enter(folder)
    mean = array.mean(dtype="float64")
    write_figure(folder, "read", time.monotonic())
    if mean != (PERIOD - 1) / 2:
        raise AssertionError(f"the array differs from the one that was sent: its mean is {mean}")


def last_element(array):
    return float(array[-1])


def return_array(_folder):
    import numpy as np

    return np.full(ELEMENTS, int(os.environ["RANK"]), dtype="float32")


def return_tensor(_folder):
    import torch

    return torch.full((ELEMENTS,), int(os.environ["RANK"]), dtype=torch.float32)


def fail_by_raising(folder):
    wait_until_others_sleep(folder)
    raise RuntimeError("on purpose")


def fail_by_sigkill(folder):
    wait_until_others_sleep(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def fail_once(folder):
    """Kill one rank when all are in the function. After the restart, only write the time."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        write_figure(folder, "restarted", time.monotonic())
        return
    enter(folder)
    fail_by_sigkill(folder)


def wait_until_others_sleep(folder):
    """Return on FAILING_RANK when all other ranks have begun to sleep. The others do not return."""
    path = f"{folder}/arrivals"  # a FIFO
    if int(os.environ["RANK"]) != FAILING_RANK:
        fifo = os.open(path, os.O_WRONLY)
        os.write(fifo, b"1")
        os.close(fifo)
        time.sleep(SLEEP_SECONDS)
        raise AssertionError("this rank was not stopped")
    fifo = os.open(path, os.O_RDWR)  # also for writing: else there would be an end of file before the first write
    for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
        os.read(fifo, 1)
    write_figure(folder, "failed", time.monotonic())


def measure_caller_cpu(folder, caller, seconds):
    """Measure on one rank how much CPU time the caller uses while all ranks sleep."""
    time.sleep(SETTLE_SECONDS)
    if int(os.environ["RANK"]) != MEASURING_RANK:
        time.sleep(seconds + SETTLE_SECONDS)
        return
    clock = (~caller << 3) | 2  # the kernel's id of the CPU clock of another process
    began, before = time.monotonic(), time.clock_gettime_ns(clock)
    time.sleep(seconds)
    after, ended = time.clock_gettime_ns(clock), time.monotonic()
    write_figure(folder, "cpu_per_hour", (after - before) / 1e9 * 3600 / (ended - began))


def print_lines(folder, count):
    lines = make_lines(int(os.environ["RANK"]))
    wait_for_all(folder)
    for _ in range(count // LINES_PER_BLOCK):
        for line in lines:
            print(line)


def print_blocks(folder, count):
    block = "\n".join(make_lines(int(os.environ["RANK"])))
    wait_for_all(folder)
    for _ in range(count // LINES_PER_BLOCK):
        print(block)


def make_lines(rank):
    """Make the lines before the clock starts. All lines of a block differ, so that a lost line is noticed."""
    return [f"{rank} {number} ".ljust(LINE - 1, "x") for number in range(LINES_PER_BLOCK)]


def wait_for_all(folder):
    """Return when all ranks have called this. Each rank keeps both FIFOs open, since else the written bytes could be lost."""
    arrivals, release = (os.open(f"{folder}/{name}", os.O_RDWR) for name in ("arrivals", "release"))
    others = int(os.environ["WORLD_SIZE"]) - 1
    if os.environ["RANK"] == "0":
        for _ in range(others):
            os.read(arrivals, 1)
        os.write(release, b"1" * others)
    else:
        os.write(arrivals, b"1")
        os.read(release, 1)


def report_often(folder):
    from mpwatch import heartbeat, report

    began = time.monotonic()
    for step in range(CALLS):
        report(step=step, total=CALLS, loss=0.5)
    reported = time.monotonic()
    for _ in range(CALLS):
        heartbeat()
    write_figure(folder, "heartbeat", (time.monotonic() - reported) / CALLS)
    write_figure(folder, "report", (reported - began) / CALLS)


def echo(connection):
    """Send back each message until the message is None. A persistent rank cannot do less."""
    while (message := connection.recv()) is not None:
        connection.send(message)


class Actor:
    """The tasks of persistent ranks, as a class for Ray."""

    def do_nothing(self):
        pass

    def last_element(self, array):
        return last_element(array)


def write_figure(folder, name, number):
    file = os.open(f"{folder}/{name}-{os.environ['RANK']}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(file, repr(number).encode())
    os.close(file)
