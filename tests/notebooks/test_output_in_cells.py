"""Output of ranks appears in the cell that called them, in the right stream, with prefixes if several ranks are shown."""

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


def sorted_lines(outputs):
    return sorted(text(outputs).splitlines())


def test_output_of_the_only_rank_that_is_shown_is_unchanged(kernel):
    only = "logs=mpwatch.LogSpec(show=0)"
    assert text(kernel.run(f"mpwatch.run(print_in_rank_0, 2, args=('hello',), {only});")) == "hello\n"
    assert text(kernel.run(f"mpwatch.run(show_progress_bar, 2, {only});"), "stderr") == "\r  0%\r 50%\r100%\n"
    outputs = kernel.run(f"mpwatch.run(print_by_descriptor, 2, {only});")
    assert text(outputs) == "by the system\n"
    assert text(outputs, "stderr") == "and by another descriptor\n"
    outputs = kernel.run("mpwatch.run(print_in_rank_0, 1, args=('no end',), kwargs={'end': ''});")
    assert text(outputs) == "no end"


def test_a_group_that_is_called_from_several_cells(kernel):
    kernel.run("group = mpwatch.WorkerGroup(2)")
    first = kernel.start_cell("group.run(print_with_rank, ('first',));")
    second = kernel.start_cell("group.run(print_with_rank, ('second',));")
    assert sorted_lines(kernel.wait_for_cell(second)) == ["[0] second 0", "[1] second 1"]
    assert sorted_lines(kernel.wait_for_cell(first)) == ["[0] first 0", "[1] first 1"]
    calls = "for n in range(3):\n    group.run(print_in_rank_0, (f'call {n}',))\n    print(f'after {n}')"
    assert text(kernel.run(calls)) == "[0] call 0\nafter 0\n[0] call 1\nafter 1\n[0] call 2\nafter 2\n"
    assert kernel.run("group.close()") == []


def test_a_cell_can_capture_the_output(kernel):
    kernel.run("%%capture captured\nmpwatch.run(print_in_rank_0, 2, args=('hello',))")
    assert kernel.value("captured.stdout") == "[0] hello\n"
    code = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as file:\n    "
    assert kernel.value(code + "mpwatch.run(print_in_rank_0, 2, args=('hello',))\nfile.getvalue()") == "[0] hello\n"
