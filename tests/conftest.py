"""Fixtures and helpers for all tests.

After each test `_check_nothing_left` compares the state of this process with that before the test: no child, thread,
descriptor or file may be left, and no setting of the process may have changed.
"""

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

SEMAPHORE_PREFIX = f"sem.mpwatch-test-{os.getpid()}-"  # of this process and its ranks: see _start_resource_tracker
RUNS = int(os.environ.get("MPWATCH_TEST_RUNS", "60"))  # of a test that checks for leaks; `tox -e chaos` sets more
PLUGIN = ("-p", "mpwatch.integrations.pytest_plugin", "-p", "no:cacheprovider")  # arguments of pytest
SPAWN = multiprocessing.get_context("spawn")


def children() -> set[int]:
    """Return the direct children of this process, including zombies, as the kernel lists them."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def descriptors() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the descriptor of listdir itself
            continue
    return found


def state() -> dict[str, object]:
    return {
        "children": children(),
        "descriptors": descriptors(),
        "threads": {thread for thread in threading.enumerate() if not thread.name.startswith("pytest_timeout")},
        "shared memory": {
            name for name in os.listdir("/dev/shm") if name.startswith(SEMAPHORE_PREFIX) or not name.startswith("sem.")
        },
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
def _start_resource_tracker():
    """Start multiprocessing's resource tracker before all tests, since it lives until this program ends."""
    resource_tracker.ensure_running()
    multiprocessing.current_process()._config["semprefix"] = f"/mpwatch-test-{os.getpid()}"
    SPAWN.Value("i")  # multiprocessing allocates an arena for shared values, and keeps it


@pytest.fixture(scope="module", autouse=True)
def _freeze_old_objects():
    """Exclude existing objects from garbage collection. With torch a full collection takes 0.1 s after each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def barrier(request):
    """Return a barrier for `nprocs` ranks. The default is three, and a parameter `nprocs` of the test overrides it."""
    return SPAWN.Barrier(request.node.callspec.params.get("nprocs", 3) if hasattr(request.node, "callspec") else 3)


@pytest.fixture
def _wait_for_all_stacks(monkeypatch):
    """Wait for the stacks of all ranks before ranks are stopped, also on a machine under load."""
    monkeypatch.setattr("mpwatch.watcher.machine.state_machine.STACK_DUMP_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def _check_nothing_left(_start_resource_tracker, request):
    if "barrier" in request.fixturenames:
        request.getfixturevalue("barrier")  # made before the comparison: its semaphores outlive the test
    before = state()
    yield
    gc.collect()
    after = state()
    assert not {name: difference(before[name], after[name]) for name in before if before[name] != after[name]}


@pytest.fixture
def run_pytest(request, monkeypatch):
    """Run a file of tests with the plugin. Plugin autoload is off, since an installed mpwatch would register it twice."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester = request.getfixturevalue("pytester")

    def run(source, *args, **files):
        pytester.makepyfile(test_it=f"import os, sys\nimport pytest\nimport mpwatch\n\n{source}", **files)
        return pytester.runpytest_subprocess(*PLUGIN, "--strict-markers", *args)

    return run


@pytest.fixture
def eventually():
    """Return a function that waits until a condition is true, and fails after a deadline."""

    def wait_for(condition, seconds=10.0):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the condition was not true after {seconds} s"
            os.sched_yield()

    return wait_for


def match_output(result, *lines):
    """Assert that pytest has printed lines that match these patterns, in this order. Return its whole output."""
    result.stdout.fnmatch_lines(lines)
    return result.stdout.str()


def is_alive(pid: int) -> bool:
    """Return whether this process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
