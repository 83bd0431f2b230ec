"""The state of this process: what a test compares before and after, since nothing may be left of a run."""

import copyreg
import faulthandler
import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

SEMAPHORE_PREFIX = f"sem.mpwatch-test-{os.getpid()}-"  # of this process and its ranks: see _start_resource_tracker
SPAWN = multiprocessing.get_context("spawn")
RUNS = int(os.environ.get("MPWATCH_TEST_RUNS", "60"))  # of a test that checks for leaks; `tox -e chaos` sets more


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


def is_alive(pid: int) -> bool:
    """Return whether this process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
