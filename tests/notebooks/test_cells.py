"""What the cells of a notebook show of runs: values, errors, tables, the live view, output, prompts. One kernel runs all the tests."""

import re

import pytest

from notebooks.kernels import run_kernel

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
DEFINITIONS = """
import multiprocessing, mpwatch, os, sys, threading
from IPython.display import DisplayHandle
class Cfg:
    def __init__(self, lr): self.lr = lr
class TooBad(Exception): pass
def rank():
    return mpwatch.current_worker().rank
def fail():
    message = "of a cell"
    for attempt in range(3):
        if attempt == 2:
            raise TooBad(message)
    return attempt
def report_steps(event):
    mpwatch.report(step=2, total=4, loss=0.5)
    is_drawn = event.wait(50)
    mpwatch.report(step=4, total=4, loss=0.25)
    return is_drawn
def print_with_rank(text):
    print(text, rank())
def print_in_rank_0(text, end="\\n"):
    if rank() == 0:
        print(text, end=end)
def print_by_descriptor():
    if rank() == 0:
        os.write(1, b"by the system\\n")
        os.write(2, b"and by another descriptor\\n")
def show_progress_bar():
    if rank() == 0:
        for percent in (0, 50, 100):
            print(f"\\r{percent:3d}%", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
def stop(n):
    values = {"rank": rank()}
    breakpoint()
    return rank() + n
def wait(event):
    event.set()
    threading.Event().wait()
def fail_in_rank_1(event):
    secret = f"secret of rank {rank()}"
    if rank() == 1:
        event.wait()
        raise ValueError("boo")
    wait(event)
is_drawn, is_waiting = [multiprocessing.get_context("spawn").Event() for _ in range(2)]
"""
WATCH_VIEW = """
def update_and_set_event(self, bundle, update=DisplayHandle.update, **more):
    update(self, bundle, **more)
    if "step 2 of 4 (50 %)" in bundle["text/plain"] and "loss 0.5; 2 ranks running" in bundle["text/plain"]:
        is_drawn.set()
DisplayHandle.update = update_and_set_event
"""


@pytest.fixture(scope="module")
def kernel():
    """A kernel in which the functions are defined."""
    yield from run_kernel(DEFINITIONS)


def text(outputs, stream="stdout"):
    """Return all output of a cell in this stream."""
    return "".join(output["text"] for output in outputs if output.get("name") == stream)


def sorted_lines(outputs):
    return sorted(text(outputs).splitlines())


# ---- Values, errors and the live view


def test_functions_classes_and_globals_of_cells(kernel):
    kernel.run("scale = 2\ndef train(cfg): return Cfg(cfg.lr * scale), rank()")
    values = "[(type(cfg) is Cfg, cfg.lr, rank) for cfg, rank in mpwatch.run(train, 2, args=(Cfg(2),))]"
    assert kernel.value(values) == [(True, 4, 0), (True, 4, 1)]
    kernel.run("scale = 3\ndef train(cfg): return Cfg(-cfg.lr * scale), rank()")  # the call uses the present definitions
    assert kernel.value(values) == [(True, -6, 0), (True, -6, 1)]
    assert kernel.value("[f() for f in mpwatch.run(lambda: lambda: scale, 2)]") == [3, 3]


def test_exceptions_of_cells(kernel):
    (output,) = kernel.run("mpwatch.run(fail, 2)")
    assert (output["output_type"], output["ename"]) == ("error", "RunFailedError")
    line = next(n for n, line in enumerate(DEFINITIONS.splitlines(), 1) if "raise TooBad" in line) - 1
    assert f"failed first: TooBad: of a cell (Cell In[1]:{line} in fail)" in output["evalue"]
    shown = COLOURS.sub("", "\n".join(output["traceback"]))
    assert f"Cell In[1], line {line}, in fail()" in shown
    assert re.search(rf"-+> {line} +raise TooBad\(message\)", shown)
    assert not re.findall(r"^File .*/mpwatch/", shown, re.MULTILINE)


def test_an_error_and_a_result_are_tables(kernel):
    kernel.run("try: mpwatch.run(fail, 2)\nexcept mpwatch.RunFailedError as caught: error = caught")
    assert kernel.value("type(error.__cause__) is TooBad")
    assert "raise TooBad(message)" in text(kernel.run("print(error.root_cause.traceback)"))
    html = kernel.run("error")[0]["data"]["text/html"]
    assert "failed first: TooBad: of a cell" in html
    assert "<summary>traceback of rank" in html
    assert "in fail\n    raise TooBad(message)" in html
    html = kernel.run("mpwatch.run(lambda: rank() * 7, 2)")[0]["data"]["text/html"]
    assert "<b>2 ranks succeeded</b>" in html
    assert '<td style="text-align:left">7</td>' in html


def test_the_live_view_is_a_table_that_is_updated_in_place(kernel):
    kernel.run(WATCH_VIEW)  # the ranks go on when the table has been updated
    shown, value = kernel.run("list(mpwatch.run(report_steps, 2, args=(is_drawn,)))")
    assert value["data"]["text/plain"] == "[True, True]"
    assert shown["data"]["text/plain"].startswith("step 4 of 4 (100 %); loss 0.25; 2 ranks returned after ")
    assert shown["data"]["text/html"].count("<tr>") == 3
    assert '<progress value="1.0000" max="1">' in shown["data"]["text/html"]
    assert kernel.value("list(mpwatch.run(report_steps, 2, args=(is_drawn,), progress=False))") == [True, True]


# ---- Output


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


# ---- Prompts of debuggers


def test_a_breakpoint_in_all_ranks(kernel):
    answers = ["p values", "ll", "w", "c", "p values", "c"]
    shown = COLOURS.sub("", kernel.converse("print(list(mpwatch.run(stop, 2, args=(1,))))", answers))
    assert sorted(re.findall(r"\(rank (\d)\) \(Pdb\) p values\n\{'rank': \1\}\n", shown)) == ["0", "1"]
    assert "    breakpoint()\n" in shown  # the source of the cell
    assert re.search(r"\(Pdb\) w\n> Cell In\[1\]\(\d+\)stop\(\)\n", shown)
    assert "/ipykernel_" not in shown
    assert re.search(r"^now at rank [01]: Cell In\[", shown, re.MULTILINE)
    assert shown.endswith("[1, 2]\n")


def test_post_mortem(kernel):
    answers = ["p secret", "q"]
    shown = kernel.converse("mpwatch.run(fail_in_rank_1, 2, args=(is_waiting,), debug='post_mortem')", answers)
    assert "(rank 1) (Pdb) p secret\n'secret of rank 1'\n" in shown
    assert "rank 1 failed first: ValueError: boo (Cell In[" in shown


def test_debug_of_ipython_opens_where_the_rank_raised(kernel):
    kernel.run("mpwatch.run(fail, 2, debug='locals')")
    shown = COLOURS.sub("", kernel.converse("%debug", ["p message", "u", "p len(dir(mpwatch)) > 0", "q"]))
    assert re.search(r"-+> \d+ +raise TooBad\(message\)", shown)
    assert "p message\n'of a cell'\n" in shown
    assert "mpwatch.run(fail, 2, debug='locals')" in shown.partition("of a cell'\n")[2]  # no frame of mpwatch lies between
    assert "> 0\nTrue\n" in shown


def test_a_notebook_without_a_user_has_no_prompt(kernel):
    no_prompt = "can open no prompt: this notebook is executed without a user"
    assert f"breakpoint() {no_prompt}" in str(kernel.run("mpwatch.run(stop, 1, args=(1,))", has_user=False))
    outputs = kernel.run("mpwatch.run(fail, 1, debug='post_mortem')", has_user=False)
    assert (text(outputs) + text(outputs, "stderr")).count(f"debug='post_mortem' {no_prompt}") == 1
