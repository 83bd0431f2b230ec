"""Fixtures for all tests.

After each test `_check_nothing_left` compares the state of this process with that before the test: no child, thread,
descriptor or file may be left, and no setting of the process may have changed.
"""

import gc
import multiprocessing
import os
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker

import pytest

from support.isolation import remove_folder
from support.process_state import SPAWN, difference, state
from support.pytest_runs import PLUGIN

with suppress(ImportError):  # some environments of tox have no hypothesis
    from hypothesis import HealthCheck, settings

    # Times measured on a busy machine are no faults.
    settings.register_profile("mpwatch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("mpwatch")

SHARING_FIXTURES = {  # files whose tests share a fixture that takes seconds
    "engines/test_ray.py",
    "notebooks/test_cells.py",
    "notebooks/test_example.py",
    "notebooks/test_kernel.py",
    "notebooks/test_ranks_magic.py",
    "trainers/test_moving.py",
    "with_torch/test_torch.py",
}


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers():
    """Return the number of processes for `-n logical`: two more than there are CPUs, since many tests wait."""
    is_chosen = "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ  # xdist reads it
    return None if is_chosen else len(os.sched_getaffinity(0)) + 2


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadgroup`, let one process run all tests of a file in SHARING_FIXTURES.

    The marker `xdist_group` does the same, but pytest-xdist 3.8 ignores it with pytest 9.2.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if file.removeprefix("tests/") in SHARING_FIXTURES else nodeid

    return Scheduling(config, log)


def pytest_unconfigure():
    remove_folder()


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
    monkeypatch.setattr("mpwatch.watcher.machine.call_machine.STACK_DUMP_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def _check_nothing_left(_start_resource_tracker, request):
    if "barrier" in request.fixturenames:
        request.getfixturevalue("barrier")  # made before the comparison: its semaphores outlive the test
    before = state()
    yield
    # As with any future, the result comes just before the thread of a run ends. torch cannot be interrupted while it connects.
    for thread in threading.enumerate():
        if thread.name in ("mpwatch call", "mpwatch-connect"):
            thread.join(15)
    gc.collect()
    after = state()
    after["shared memory"] |= before["shared memory"]  # what an earlier test used may disappear late
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
