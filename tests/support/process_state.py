"""The state of this process: what a test compares before and after, since nothing may be left of a run.

It has only what this process and its ranks have made. Other programs, such as a second run of the tests, do not change it.
"""

import copyreg
import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

SEMAPHORE_PREFIX = f"sem.mpwatch-test-{os.getpid()}-"  # of this process and its ranks: see _start_resource_tracker
TAG = f"MPWATCH_TESTS={os.environ.get('MPWATCH_TESTS', '')}"  # in the environment of all processes of these tests: see isolation.py
SOCKETS = Path(f"/tmp/mpwatch-{os.geteuid()}")  # of jobs that other programs may look into
SPAWN = multiprocessing.get_context("spawn")
RUNS = int(os.environ.get("MPWATCH_TEST_RUNS", "60"))  # of a test that checks for leaks; `tox -e chaos` sets more


def children() -> set[int]:
    """Return the direct children of this process, including zombies, as Linux lists them. Other systems list none."""
    found = set()
    for task in Path("/proc/self/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def descriptors() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/dev/fd"):
        try:
            found[int(entry)] = os.readlink(f"/dev/fd/{entry}")
        except FileNotFoundError:  # the descriptor of listdir itself
            continue
        except OSError:  # of macOS, where these are no links
            found[int(entry)] = ""
    return found


def is_own_shared_memory(name: str) -> bool:
    """Return whether a file in /dev/shm is of this process or its ranks. torch puts the pid into the names of its files."""
    if name.startswith(SEMAPHORE_PREFIX):
        return True
    is_of_torch = re.match(r"torch_(\d+)_", name)
    if not is_of_torch:
        return False
    try:
        return TAG.encode() in Path(f"/proc/{is_of_torch[1]}/environ").read_bytes().split(b"\0")
    except PermissionError:  # it is another user's
        return False
    except (FileNotFoundError, ProcessLookupError):  # the process has left this file, or has just deleted it
        return os.path.exists(f"/dev/shm/{name}")


def state() -> dict[str, object]:
    return {
        "children": children(),
        "descriptors": descriptors(),
        "threads": {thread for thread in threading.enumerate() if not thread.name.startswith("pytest_timeout")},
        "shared memory": {path.name for path in Path("/dev/shm").glob("*") if is_own_shared_memory(path.name)},
        "temporary files": {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("mpwatch")}
        - {SOCKETS.name},
        "sockets": {path.name for path in SOCKETS.glob(f"{os.getpid()}-*")},
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
    """Return whether this process runs. A zombie does not, where there is /proc."""
    if not Path("/proc").exists():
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            return True
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
