"""Every test ends with a look at the process: nothing may be left, and nothing of the host's may have changed."""

import copyreg
import faulthandler
import gc
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

OURS = f"sem.mpwatch-test-{os.getpid()}-"  # semaphores, of our ranks too, have a prefix of their own: see _resource_tracker
RUNS = int(os.environ.get("MPWATCH_TEST_RUNS", "60"))  # in which nothing may grow; `tox -e chaos` has more of them
PLUGIN = ("-p", "mpwatch.integrations.pytest_plugin", "-p", "no:cacheprovider")  # arguments of pytest
SPAWN = multiprocessing.get_context("spawn")


def children() -> set[int]:
    """The direct children of this process, zombies among them, from the kernel itself."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def descriptors() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the one of the listing itself
            continue
    return found


def state() -> dict[str, object]:
    return {
        "children": children(),
        "descriptors": descriptors(),
        "threads": {thread for thread in threading.enumerate() if not thread.name.startswith("pytest_timeout")},
        "shared memory": {name for name in os.listdir("/dev/shm") if name.startswith(OURS) or not name.startswith("sem.")},
        "temporary files": {name for name in os.listdir("/tmp") if name.startswith("mpwatch")},
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "start method": multiprocessing.get_start_method(allow_none=True),
        "copyreg": dict(copyreg.dispatch_table),
        "faulthandler": faulthandler.is_enabled(),
        "folder": os.getcwd(),
    }


def difference(before, after):
    if isinstance(before, dict):
        before, after = before.items(), after.items()
    return (before - after, after - before) if hasattr(before, "isdisjoint") else (before, after)


@pytest.fixture(scope="session", autouse=True)
def _resource_tracker():
    """multiprocessing's own helper lives as long as the program that has started a process with it."""
    resource_tracker.ensure_running()
    multiprocessing.current_process()._config["semprefix"] = f"/mpwatch-test-{os.getpid()}"
    SPAWN.Value("i")  # and the memory that its shared values are cut from is kept


@pytest.fixture(scope="module", autouse=True)
def _look_for_new_garbage_only():
    """To look through all that is there takes 0.1 s after each test where torch is loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def barrier(request):
    """For as many ranks as the test's `nprocs`, three unless it says otherwise."""
    return SPAWN.Barrier(request.node.callspec.params.get("nprocs", 3) if hasattr(request.node, "callspec") else 3)


@pytest.fixture
def _patient(monkeypatch):
    """However loaded this machine is, the stacks of all ranks come before they are stopped."""
    monkeypatch.setattr("mpwatch.watcher.machine.state_machine.STACK_DUMP_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def _nothing_left(_resource_tracker, request):
    if "barrier" in request.fixturenames:
        request.getfixturevalue("barrier")  # its semaphores live longer than the test
    before = state()
    yield
    gc.collect()
    after = state()
    assert not {name: difference(before[name], after[name]) for name in before if before[name] != after[name]}


@pytest.fixture
def run_pytest(request, monkeypatch):
    """Run a file of tests with the plugin; where mpwatch is installed, its entry point would bring it a second time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester = request.getfixturevalue("pytester")

    def run(source, *args, **files):
        pytester.makepyfile(test_it=f"import os, sys\nimport pytest\nimport mpwatch\n\n{source}", **files)
        return pytester.runpytest_subprocess(*PLUGIN, "--strict-markers", *args)

    return run


@pytest.fixture
def eventually():
    """Wait for something that another process does, with a deadline."""

    def wait_for(condition, seconds=10.0):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            os.sched_yield()

    return wait_for


def shows(result, *lines):
    """Whether pytest has printed these lines, in this order. Returns all that it has printed."""
    result.stdout.fnmatch_lines(lines)
    return result.stdout.str()


def is_alive(pid: int) -> bool:
    """Whether this process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
