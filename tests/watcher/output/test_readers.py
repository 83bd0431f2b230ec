"""Readers of a program's stdout that are slow, do not read, or close the pipe; and other writers to the same pipe."""

import signal
import subprocess
import sys

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
