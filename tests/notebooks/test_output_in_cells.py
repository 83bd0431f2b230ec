"""Output of ranks appears in the cell that called them, in the right stream, with prefixes if several ranks print."""

import os
import re

import pytest

from notebooks.kernels import Kernel

DEFINITIONS = """
import mpwatch, multiprocessing, os, sys
spawn = multiprocessing.get_context("spawn")
def rank():
    return mpwatch.current_worker().rank
def print_with_rank(text):
    print(text, rank())
def print_in_rank_0(text, end="\\n", file="stdout"):
    if rank() == 0:
        print(text, end=end, file=getattr(sys, file))
def print_one_after_another(barrier, path):
    if rank() == 0:
        print("a 0\\nbe", end="", flush=True)
        barrier.wait()
        print("gun 0")
    else:
        with open(path) as fifo:
            fifo.read()
        print("c 1", flush=True)
        barrier.wait()
def print_by_descriptor():
    if rank() == 0:
        os.write(1, b"by the system\\n")
        os.write(2, b"and by another descriptor\\n")
def show_progress_bar():
    if rank() == 0:
        for percent in (0, 50, 100):
            print(f"\\r{percent:3d}%", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
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


def lines_without_prefix(outputs):
    """Return the lines without their prefixes, sorted."""
    lines = []
    for line in text(outputs).splitlines():
        prefix, text_of_line, rank = re.fullmatch(r"(?:\[(\d)\] )?(.*(\d))", line).groups()
        assert prefix in (None, rank)
        lines.append(text_of_line)
    return sorted(lines)


def test_output_of_one_rank_is_unchanged(kernel):
    assert text(kernel.run("mpwatch.run(print_in_rank_0, 2, args=('hello',));")) == "hello\n"
    assert text(kernel.run("mpwatch.run(show_progress_bar, 2);"), "stderr") == "\r  0%\r 50%\r100%\n"
    outputs = kernel.run("mpwatch.run(print_by_descriptor, 2);")
    assert text(outputs) == "by the system\n"
    assert text(outputs, "stderr") == "and by another descriptor\n"
    outputs = kernel.run("mpwatch.run(print_in_rank_0, 2, args=('no end',), kwargs={'end': ''});")
    assert text(outputs).rstrip("\n") == "no end"


def test_lines_have_prefixes_once_a_second_rank_prints(kernel, tmp_path, eventually):
    path = tmp_path / "go"
    os.mkfifo(path)
    cell = kernel.start_cell(f"mpwatch.run(print_one_after_another, 2, args=(spawn.Barrier(2), {str(path)!r}));")
    eventually(lambda: text(kernel.outputs_of(cell)) == "a 0\nbe")
    path.open("w").close()
    assert text(kernel.wait_for_cell(cell)) == "a 0\nbe\n[1] c 1\n[0] begun 0\n"


def test_a_group_that_is_called_from_several_cells(kernel):
    kernel.run("group = mpwatch.WorkerGroup(2)")
    first = kernel.start_cell("group.run(print_with_rank, ('first',));")
    second = kernel.start_cell("group.run(print_with_rank, ('second',));")
    assert lines_without_prefix(kernel.wait_for_cell(second)) == ["second 0", "second 1"]
    assert lines_without_prefix(kernel.wait_for_cell(first)) == ["first 0", "first 1"]
    calls = "for n in range(3):\n    group.run(print_in_rank_0, (f'call {n}',))\n    print(f'after {n}')"
    assert text(kernel.run(calls)) == "call 0\nafter 0\ncall 1\nafter 1\ncall 2\nafter 2\n"
    assert kernel.run("group.close()") == []


def test_a_cell_can_capture_the_output(kernel):
    kernel.run("%%capture captured\nmpwatch.run(print_in_rank_0, 2, args=('hello',))")
    assert kernel.value("captured.stdout") == "hello\n"
    code = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as file:\n    "
    assert kernel.value(code + "mpwatch.run(print_in_rank_0, 2, args=('hello',))\nfile.getvalue()") == "hello\n"
