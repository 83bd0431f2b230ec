"""What ranks print is seen in the cell that called them, by the stream of that cell, and says who printed it if need be."""

import re

import pytest
from kernels import Kernel

DEFINITIONS = """
import mpwatch, multiprocessing, os, signal, sys, time
def rank():
    return mpwatch.current_worker().rank
def say(text):
    print(text, rank())
def rank_0_says(text, end="\\n", file="stdout"):
    if rank() == 0:
        print(text, end=end, file=getattr(sys, file))
def all_say_twice(barrier):
    say("hello")
    sys.stdout.flush()
    barrier.wait()
    say("again")
def say_in_c():
    if rank() == 0:
        os.write(1, b"by the system\\n")
        os.write(2, b"and by another descriptor\\n")
def last_words():
    if rank() == 0:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
def bar():
    if rank() == 0:
        for percent in (0, 50, 100):
            print(f"\\r{percent:3d}%", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
def much(lines):
    for n in range(lines):
        print(f"line {n} of rank {rank()}")
"""


@pytest.fixture(scope="module")
def kernel():
    """The functions of a first cell are there."""
    kernel = Kernel()
    assert kernel.run(DEFINITIONS) == []
    yield kernel
    kernel.close()


def text(outputs, stream="stdout"):
    """All that a cell has put out by this stream."""
    return "".join(output["text"] for output in outputs if output.get("name") == stream)


def said_by(outputs):
    """The lines, without the ranks that they are marked with; and the ranks of which some line has no mark."""
    lines, unmarked = [], set()
    for line in text(outputs).splitlines():
        mark, said, who = re.fullmatch(r"(?:\[(\d)\] )?(.*(\d))", line).groups()
        assert mark in (None, who)
        unmarked |= {who} if mark is None else set()
        lines.append(said)
    return sorted(lines), unmarked


def test_one_rank_needs_no_mark(kernel):
    assert text(kernel.run("mpwatch.run(rank_0_says, 2, args=('hello',));")) == "hello\n"
    outputs = kernel.run("mpwatch.run(rank_0_says, 2, args=('oh',), kwargs={'file': 'stderr'});")
    assert (text(outputs), text(outputs, "stderr")) == ("", "oh\n")


def test_several_are_told_from_each_other(kernel):
    outputs = kernel.run("mpwatch.run(all_say_twice, 2, args=(multiprocessing.get_context('spawn').Barrier(2),));")
    lines, unmarked = said_by(outputs)
    assert lines == ["again 0", "again 1", "hello 0", "hello 1"]
    assert len(unmarked) <= 1  # the first that spoke, as long as it was the only one


def test_a_group_that_is_called_from_several_cells(kernel):
    kernel.run("group = mpwatch.WorkerGroup(2)")
    first = kernel.begin("group.run(say, ('first',));")
    second = kernel.begin("group.run(say, ('second',));")
    assert said_by(kernel.finish(second))[0] == ["second 0", "second 1"]
    assert said_by(kernel.finish(first))[0] == ["first 0", "first 1"]
    assert text(kernel.run("for n in range(3):\n    group.run(rank_0_says, (f'call {n}',))\n    print(f'after {n}')")) == (
        "call 0\nafter 0\ncall 1\nafter 1\ncall 2\nafter 2\n"
    )
    assert kernel.run("group.close()") == []


def test_output_of_compiled_code(kernel):
    outputs = kernel.run("mpwatch.run(say_in_c, 2);")
    assert text(outputs) == "by the system\n"
    assert text(outputs, "stderr") == "and by another descriptor\n"


def test_the_last_words_of_a_rank_that_is_killed(kernel):
    outputs = kernel.run("mpwatch.run(last_words, 2)")
    assert "last words\n" in text(outputs)
    assert outputs[-1]["ename"] == "RunFailedError"


def test_progress_bars(kernel):
    assert text(kernel.run("mpwatch.run(bar, 2);"), "stderr") == "\r  0%\r 50%\r100%\n"


def test_a_line_without_an_end(kernel):
    outputs = kernel.run("mpwatch.run(rank_0_says, 2, args=('no end',), kwargs={'end': ''});")
    assert text(outputs).rstrip("\n") == "no end"


def test_much_of_it_is_whole(kernel):
    outputs = kernel.run("mpwatch.run(much, 2, args=(2000,));")
    assert said_by(outputs)[0] == sorted(f"line {n} of rank {rank}" for rank in range(2) for n in range(2000))


def test_a_cell_may_capture_it(kernel):
    kernel.run("%%capture captured\nmpwatch.run(rank_0_says, 2, args=('hello',))")
    assert kernel.value("captured.stdout") == "hello\n"
    code = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as file:\n    "
    assert kernel.value(code + "mpwatch.run(rank_0_says, 2, args=('hello',))\nfile.getvalue()") == "hello\n"
