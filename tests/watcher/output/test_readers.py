"""Readers of a program's stdout that are slow, do not read, or close the pipe; and other writers to the same pipe."""

import fcntl
import os
import select
import signal
import subprocess
import sys
import termios

import pytest

from support.programs import ENV

IMPORTS = """
import os, sys, threading, mpwatch
from watcher.output import printing_functions
from support.process_state import SPAWN
"""
# For each line on its stdin, prints to stderr how many lines its rank has written by now.
LINE_COUNTER = """
written = SPAWN.Value("i")
def answer():
    for line in sys.stdin:
        print(written.value, file=sys.stderr, flush=True)
threading.Thread(target=answer, daemon=True).start()
logs = mpwatch.LogSpec(prefix="> ")
try:
    mpwatch.run(printing_functions.print_and_count_lines, 1, args=(3000, written), logs=logs, grace_period=1)
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    os._exit(0)
"""


def start(program, *args):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", IMPORTS + program, *args], **pipes, env=ENV, text=True)


@pytest.fixture
def line_counter():
    with start(LINE_COUNTER) as program:
        yield program


def count_written(program):
    program.stdin.write("\n")
    program.stdin.flush()
    return int(program.stderr.readline())


def test_a_slow_reader_slows_the_rank_and_loses_nothing(line_counter):
    """The rank writes 3 MB. Bytes that are written and not yet read fit into the pipes and the watcher's buffer."""
    for n in range(3000):
        assert line_counter.stdout.readline() == "> " + f"{n}".ljust(999, ".") + "\n"
        assert n % 100 or count_written(line_counter) - n < 600
    assert line_counter.stdout.read() == ""
    line_counter.stdin.close()
    assert line_counter.wait() == 0


def test_ctrl_c_ends_a_run_whose_reader_does_not_read(line_counter, eventually):
    line_counter.stdout.readline()  # nothing more is read
    eventually(lambda: count_written(line_counter) > 300)
    line_counter.send_signal(signal.SIGINT)
    line_counter.stdin.close()
    stderr = line_counter.stderr.read()
    assert line_counter.wait() == 0
    assert "the output of the ranks is incomplete: the reader of stdout or stderr did not read it in time" in stderr
    assert stderr.endswith("interrupted\n")


def test_a_reader_that_closes_the_pipe_does_not_stop_the_ranks(tmp_path):
    program = """
result = mpwatch.run(printing_functions.print_lines, 2, args=(20000,), logs=mpwatch.LogSpec(sys.argv[1]))
print(list(result), file=sys.stderr)
"""
    with start(program, str(tmp_path)) as process:
        process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
    assert "the output of the ranks can no longer be written to stdout: its rest is dropped (BrokenPipeError" in stderr
    assert "[20000, 20000]" in stderr
    assert {path.stat().st_size for path in tmp_path.rglob("stdout.log")} == {20000 * 100}


def test_lines_of_other_writers_come_between_lines():
    program = """
is_over = threading.Event()
def write_lines():
    while not is_over.is_set():
        os.write(1, b"program".ljust(4000, b".") + b"\\n")
thread = threading.Thread(target=write_lines)
thread.start()
mpwatch.run(printing_functions.print_lines, 2, args=(60, 1000), logs=mpwatch.LogSpec())
is_over.set()
print("over", file=sys.stderr, flush=True)
thread.join()
"""
    with start(program) as process:
        out, data = process.stdout.fileno(), b""
        while not select.select([process.stderr], [], [], 0)[0]:  # both writers always wait for room
            if count_unread_bytes(out) > 20_000:
                data += os.read(out, select.PIPE_BUF)
        lines = (data.decode() + process.stdout.read()).splitlines()
    assert {(line[:3], len(line)) for line in lines} == {("[0]", 1003), ("[1]", 1003), ("pro", 4000)}
    assert sum(line.startswith("[") for line in lines) == 120


def count_unread_bytes(fd):
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
