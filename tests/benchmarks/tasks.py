"""What the ranks do. Every launcher finds these by name, in a module that costs a rank next to nothing to import.

Who a rank is, is in its environment, as RANK: launchers that do not put it there call `ranked`. What a rank has to say, it
leaves as a file in the folder of the measurement, under its name; instants are of CLOCK_MONOTONIC, which all share.
"""

import os
import signal
import time

__all__ = [
    "Actor",
    "die_once",
    "echo",
    "enter",
    "enter_with_torch",
    "fail_by_raising",
    "fail_by_sigkill",
    "give",
    "give_tensor",
    "last_of",
    "lines_of",
    "look_at_caller",
    "nothing",
    "print_blocks",
    "print_lines",
    "ranked",
    "report_often",
    "take",
]

FAILING = 1
LOOKING = 0
ELEMENTS = 16_000_000  # of 4 bytes
PERIOD = 1000  # the numbers of an argument are 0, 1, ..., 999, and so on
LONG = 600.0  # seconds
CYCLE = 1000  # lines, after which a rank's are the same again
LINE = 100  # bytes, with the line's end
CALLS = 200_000
SETTLED = 2.0  # seconds in which a launch is over for the caller, too, and all ranks have come


def ranked(rank, task, *args):
    os.environ["RANK"] = str(rank)
    return task(*args)


def nothing(*_):
    pass


def enter(folder):
    tell(folder, "entered", time.monotonic())


def enter_with_torch(folder):
    import torch  # noqa: F401

    enter(folder)


def take(folder, array):
    """The bytes themselves may arrive only when they are looked at; so that is told, too."""
    enter(folder)
    mean = array.mean(dtype="float64")
    tell(folder, "read", time.monotonic())
    if mean != (PERIOD - 1) / 2:
        raise AssertionError(f"not the numbers that were sent: their mean is {mean}")


def last_of(array):
    return float(array[-1])


def give(_folder):
    import numpy as np

    return np.full(ELEMENTS, int(os.environ["RANK"]), dtype="float32")


def give_tensor(_folder):
    import torch

    return torch.full((ELEMENTS,), int(os.environ["RANK"]), dtype=torch.float32)


def fail_by_raising(folder):
    all_in_then_one(folder)
    raise RuntimeError("on purpose")


def fail_by_sigkill(folder):
    all_in_then_one(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(folder):
    """One is killed when all are in; the next time they have come again, and that is all."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        tell(folder, "again", time.monotonic())
        return
    enter(folder)
    fail_by_sigkill(folder)


def all_in_then_one(folder):
    """Returns in one rank alone, when all others have begun their sleep."""
    door = f"{folder}/door"  # a FIFO
    if int(os.environ["RANK"]) != FAILING:
        knock = os.open(door, os.O_WRONLY)
        os.write(knock, b"1")
        os.close(knock)
        time.sleep(LONG)
        raise AssertionError("nobody stopped this rank")
    listen = os.open(door, os.O_RDWR)  # for writing as well, lest it is at its end before the first has come
    for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
        os.read(listen, 1)
    tell(folder, "failed", time.monotonic())


def look_at_caller(folder, caller, seconds):
    """How much CPU time the caller takes while all ranks sleep: read by one of them, at two instants of that sleep."""
    time.sleep(SETTLED)
    if int(os.environ["RANK"]) != LOOKING:
        time.sleep(seconds + SETTLED)
        return
    clock = (~caller << 3) | 2  # the kernel's number for the CPU clock of another process
    began, before = time.monotonic(), time.clock_gettime_ns(clock)
    time.sleep(seconds)
    after, ended = time.clock_gettime_ns(clock), time.monotonic()
    tell(folder, "burnt", (after - before) / 1e9 * 3600 / (ended - began))


def print_lines(folder, count):
    lines = lines_of(int(os.environ["RANK"]))
    all_in(folder)
    for _ in range(count // CYCLE):
        for line in lines:
            print(line)


def print_blocks(folder, count):
    block = "\n".join(lines_of(int(os.environ["RANK"])))
    all_in(folder)
    for _ in range(count // CYCLE):
        print(block)


def lines_of(rank):
    """Ready to be printed, so that what is timed is not how they are made; each is another, so that none is lost unseen."""
    return [f"{rank} {number} ".ljust(LINE - 1, "x") for number in range(CYCLE)]


def all_in(folder):
    """Returns in all ranks, when the last of them has come. Each holds both FIFOs open, lest what was written is lost."""
    door, gate = (os.open(f"{folder}/{name}", os.O_RDWR) for name in ("door", "gate"))
    others = int(os.environ["WORLD_SIZE"]) - 1
    if os.environ["RANK"] == "0":
        for _ in range(others):
            os.read(door, 1)
        os.write(gate, b"1" * others)
    else:
        os.write(door, b"1")
        os.read(gate, 1)


def report_often(folder):
    from mpwatch import heartbeat, report

    began = time.monotonic()
    for step in range(CALLS):
        report(step=step, total=CALLS, loss=0.5)
    reported = time.monotonic()
    for _ in range(CALLS):
        heartbeat()
    tell(folder, "heartbeat", (time.monotonic() - reported) / CALLS)
    tell(folder, "report", (reported - began) / CALLS)


def echo(connection):
    """The least that a warm rank can do: send back what comes, until nothing does."""
    while (message := connection.recv()) is not None:
        connection.send(message)


class Actor:
    """The tasks for warm ranks, for Ray."""

    def nothing(self):
        pass

    def last_of(self, array):
        return last_of(array)


def tell(folder, what, number):
    file = os.open(f"{folder}/{what}-{os.environ['RANK']}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(file, repr(number).encode())
    os.close(file)
