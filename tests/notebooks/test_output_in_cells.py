"""Output of ranks appears in the cell that called them, in the right stream, with prefixes if several ranks print."""

import re

import pytest

from notebooks.kernels import Kernel

DEFINITIONS = """
import mpwatch, multiprocessing, os, signal, sys, time
def rank():
    return mpwatch.current_worker().rank
def print_with_rank(text):
    print(text, rank())
def print_in_rank_0(text, end="\\n", file="stdout"):
    if rank() == 0:
        print(text, end=end, file=getattr(sys, file))
def print_twice(barrier):
    print_with_rank("hello")
    sys.stdout.flush()
    barrier.wait()
    print_with_rank("again")
def print_by_descriptor():
    if rank() == 0:
        os.write(1, b"by the system\\n")
        os.write(2, b"and by another descriptor\\n")
def print_and_kill_itself():
    if rank() == 0:
        print("last line", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
def show_progress_bar():
    if rank() == 0:
        for percent in (0, 50, 100):
            print(f"\\r{percent:3d}%", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
def print_lines(lines):
    for n in range(lines):
        print(f"line {n} of rank {rank()}")
"""


@pytest.fixture(scope="module")
def kernel():
    """A kernel in which the functions are defined."""
    kernel = Kernel()
    assert kernel.run(DEFINITIONS) == []
    yield kernel
    kernel.close()


def text(outputs, stream="stdout"):
    """Return all output of a cell in this stream."""
    return "".join(output["text"] for output in outputs if output.get("name") == stream)


def split_lines(outputs):
    """Return the lines without their prefixes, sorted, and the ranks that have printed a line without a prefix."""
    lines, unprefixed = [], set()
    for line in text(outputs).splitlines():
        prefix, text_of_line, rank = re.fullmatch(r"(?:\[(\d)\] )?(.*(\d))", line).groups()
        assert prefix in (None, rank)
        unprefixed |= {rank} if prefix is None else set()
        lines.append(text_of_line)
    return sorted(lines), unprefixed


def test_output_of_one_rank_has_no_prefix(kernel):
    assert text(kernel.run("mpwatch.run(print_in_rank_0, 2, args=('hello',));")) == "hello\n"
    outputs = kernel.run("mpwatch.run(print_in_rank_0, 2, args=('oh',), kwargs={'file': 'stderr'});")
    assert (text(outputs), text(outputs, "stderr")) == ("", "oh\n")


def test_output_of_several_ranks_has_prefixes(kernel):
    outputs = kernel.run("mpwatch.run(print_twice, 2, args=(multiprocessing.get_context('spawn').Barrier(2),));")
    lines, unprefixed = split_lines(outputs)
    assert lines == ["again 0", "again 1", "hello 0", "hello 1"]
    assert len(unprefixed) <= 1  # the rank that printed first, until another rank printed


def test_a_group_that_is_called_from_several_cells(kernel):
    kernel.run("group = mpwatch.WorkerGroup(2)")
    first = kernel.start_cell("group.run(print_with_rank, ('first',));")
    second = kernel.start_cell("group.run(print_with_rank, ('second',));")
    assert split_lines(kernel.wait_for_cell(second))[0] == ["second 0", "second 1"]
    assert split_lines(kernel.wait_for_cell(first))[0] == ["first 0", "first 1"]
    assert text(
        kernel.run("for n in range(3):\n    group.run(print_in_rank_0, (f'call {n}',))\n    print(f'after {n}')")
    ) == ("call 0\nafter 0\ncall 1\nafter 1\ncall 2\nafter 2\n")
    assert kernel.run("group.close()") == []


def test_output_by_descriptor(kernel):
    outputs = kernel.run("mpwatch.run(print_by_descriptor, 2);")
    assert text(outputs) == "by the system\n"
    assert text(outputs, "stderr") == "and by another descriptor\n"


def test_output_of_a_rank_before_it_is_killed(kernel):
    outputs = kernel.run("mpwatch.run(print_and_kill_itself, 2)")
    assert "last line\n" in text(outputs)
    assert outputs[-1]["ename"] == "RunFailedError"


def test_progress_bars(kernel):
    assert text(kernel.run("mpwatch.run(show_progress_bar, 2);"), "stderr") == "\r  0%\r 50%\r100%\n"


def test_an_unfinished_line(kernel):
    outputs = kernel.run("mpwatch.run(print_in_rank_0, 2, args=('no end',), kwargs={'end': ''});")
    assert text(outputs).rstrip("\n") == "no end"


def test_many_lines_stay_whole(kernel):
    outputs = kernel.run("mpwatch.run(print_lines, 2, args=(2000,));")
    assert split_lines(outputs)[0] == sorted(f"line {n} of rank {rank}" for rank in range(2) for n in range(2000))


def test_a_cell_can_capture_the_output(kernel):
    kernel.run("%%capture captured\nmpwatch.run(print_in_rank_0, 2, args=('hello',))")
    assert kernel.value("captured.stdout") == "hello\n"
    code = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as file:\n    "
    assert kernel.value(code + "mpwatch.run(print_in_rank_0, 2, args=('hello',))\nfile.getvalue()") == "hello\n"
