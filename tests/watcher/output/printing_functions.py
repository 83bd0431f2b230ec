"""Functions for ranks that print: by Python, by C, from other processes, and shortly before they end."""

import ctypes
import os
import subprocess
import sys

import mpwatch
from support.functions import rank


def print_hello():
    print("out", rank())
    print("err", rank(), file=sys.stderr)


def write_in_portions(data, size):
    for start in range(0, len(data), size):
        os.write(1, data[start : start + size])


def print_in_every_way():
    print("python")
    libc = ctypes.CDLL(None)
    libc.puts(b"c")
    libc.printf(b"c without an end, ")
    libc.fflush(None)
    subprocess.run(["echo", "program"], check=True)
    os.write(1, b"\xff descriptor\n")
    libc.printf(b"not flushed")


def print_lines(lines, width=100):
    me = rank()
    block = 100
    for first in range(0, lines, block):
        numbers = range(first, min(first + block, lines))
        sys.stdout.write("".join(f"{me} {n}".ljust(width - 1, ".") + "\n" for n in numbers))
    return lines


def print_and_count_lines(lines, written):
    for n in range(lines):
        os.write(1, f"{n}".ljust(999, ".").encode() + b"\n")
        written.value = n + 1


def print_and_crash():
    print("last line")
    print("without an end, ", end="", flush=True)
    ctypes.CDLL(None).puts(b"last line of c")
    ctypes.string_at(0)


def warn_and_raise(text):
    sys.stderr.write(text)
    raise ValueError("bad")


def start_daemon(pid):
    """Start a process that keeps stdout and stderr open. It has its own session, so it is not stopped with the rank."""
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    pid.value = daemon.pid
    daemon.returncode = 0  # it must not be waited for
    print("daemon started")


def fail_in_first_attempt():
    me = mpwatch.current_worker()
    print("attempt", me.restart_count)
    if me.rank == 1 and not me.restart_count:
        raise ValueError("bad")
