"""A real kernel that is interrupted, restarted and killed, with threads, an event loop, and groups that serve several cells.

One kernel, which some tests restart, runs all the tests.
"""

import os
import re

import pytest

import mpwatch
from notebooks.kernels import run_kernel
from support.process_state import is_alive
from test_running_jobs import find_job, running

DEFINITIONS = """
import asyncio, mpwatch, os, signal, subprocess, threading
from pathlib import Path
def mark(name, folder):
    Path(folder, str(name)).touch()
def wait(folder):
    mark(os.getpid(), folder)
    while True:
        threading.Event().wait()
def wait_with_helper(folder):
    mark(subprocess.Popen(["sleep", "1000"]).pid, folder)
    wait(folder)
def wait_ignoring_signals(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda *_: mark(f"ignored {os.getpid()}", folder))
    wait_with_helper(folder)
def pids():
    return os.getpid()
"""


@pytest.fixture(scope="module")
def kernel():
    """A kernel in which the functions are defined."""
    yield from run_kernel(DEFINITIONS)


def interrupt_cell(kernel, cell):
    """Interrupt the kernel and return the error that the cell ends with, long before `grace_period`."""
    kernel.interrupt()
    return kernel.wait_for_cell(cell)[-1]


@pytest.fixture
def start_waiting_cell(kernel, tmp_path, eventually):
    """Start a cell that calls a `wait...` function in two ranks. Return the cell and the pids of ranks and helpers."""

    def start(call):
        cell = kernel.start_cell(call.replace("FOLDER", repr(str(tmp_path))))
        processes = 4 if "helper" in call or "ignoring" in call else 2
        eventually(lambda: len(os.listdir(tmp_path)) == processes, 30.0)
        return cell, [int(name) for name in os.listdir(tmp_path)]

    return start


def test_a_notebook_looks_into_the_job_of_a_script(kernel, eventually):
    with running() as program:
        find_job(program.pid, eventually)
        assert kernel.value(f"mpwatch.attach({program.pid}).ranks") == (0, 1)
        view = kernel.start_cell(f"mpwatch.attach({program.pid}).view()")
        eventually(lambda: "of 10000" in str(kernel.outputs_of(view)), 30.0)
        mpwatch.attach(program.pid).request_stop()
        assert kernel.wait_for_cell(view) is not None
        assert program.communicate()[0] == "SUCCEEDED\n"


def test_an_interrupt_ends_a_run(kernel, start_waiting_cell):
    cell, processes = start_waiting_cell("mpwatch.run(wait_with_helper, 2, args=(FOLDER,), grace_period=1000)")
    error = interrupt_cell(kernel, cell)
    assert error["ename"] == "KeyboardInterrupt"
    assert sum("/mpwatch/" in frame for frame in error["traceback"]) == 1  # the others are hidden
    assert re.search(r"stopped by the watcher.* \(Cell In\[", "".join(error["traceback"]))
    assert not any(is_alive(pid) for pid in processes)
    assert kernel.value("list(mpwatch.run(lambda: 7, 2))") == [7, 7]


def test_a_second_interrupt_kills_ranks_that_ignore_the_first(kernel, start_waiting_cell, tmp_path, eventually):
    cell, processes = start_waiting_cell("mpwatch.run(wait_ignoring_signals, 2, args=(FOLDER,), grace_period=1000)")
    kernel.interrupt()
    eventually(lambda: sum(name.startswith("ignored") for name in os.listdir(tmp_path)) == 2)
    assert interrupt_cell(kernel, cell)["ename"] == "KeyboardInterrupt"
    assert not any(is_alive(pid) for pid in processes)


def test_cells_with_magic_with_await_and_beside_threads_and_tasks(kernel):
    kernel.run("""
threading.Thread(target=threading.Event().wait, daemon=True).start()
async def tick():
    while True:
        await asyncio.sleep(0.001)
task = asyncio.ensure_future(tick())
""")
    timed, value = kernel.run("%%time\nlist(mpwatch.run(lambda: 4, 2))")
    assert "Wall time" in timed["text"]
    assert value["data"]["text/plain"] == "[4, 4]"
    assert kernel.value("await asyncio.sleep(0)\nlist(mpwatch.run(lambda: 5, 2))") == [5, 5]
    assert kernel.value("list(await asyncio.to_thread(mpwatch.run, lambda: 6, 2))") == [6, 6]
    assert kernel.value("task.cancel()")


def test_an_interrupt_of_a_cell_with_await(kernel, start_waiting_cell):
    """For such a cell ipykernel has its own signal handler, which raises nothing, so the run raises RunFailedError."""
    cell, processes = start_waiting_cell("await asyncio.sleep(0)\nmpwatch.run(wait, 2, args=(FOLDER,), grace_period=1000)")
    assert interrupt_cell(kernel, cell)["ename"] == "RunFailedError"
    assert not any(is_alive(pid) for pid in processes)
    assert kernel.value("1 + 1") == 2


def test_a_group_that_is_not_closed_ends_with_the_kernel(kernel, eventually):
    ranks = kernel.value("forgotten = mpwatch.WorkerGroup(2)\nlist(forgotten.run(pids))")
    kernel.run("exit")
    eventually(lambda: not is_alive(kernel.pid()))
    assert not any(is_alive(pid) for pid in ranks)
    assert "mpwatch" not in kernel.log()
    assert "Traceback" not in kernel.log()
    kernel.restart(now=True)
    assert kernel.run(DEFINITIONS) == []


@pytest.mark.parametrize(
    ("now", "call"),
    [
        (True, "mpwatch.run(wait_ignoring_signals, 2, args=(FOLDER,))"),  # by SIGKILL
        pytest.param(False, "mpwatch.WorkerGroup(2).run(wait_with_helper, (FOLDER,))", marks=pytest.mark.slow),
    ],
)
def test_ranks_end_when_the_kernel_is_restarted(now, call, kernel, start_waiting_cell, eventually):
    _, processes = start_waiting_cell(call)
    kernel.restart(now=now)
    eventually(lambda: not any(is_alive(pid) for pid in processes))
    assert kernel.run(DEFINITIONS) == []
