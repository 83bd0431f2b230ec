"""Tests of shortages on the host: descriptors, processes, memory, folders, exit codes of children.

The error of a failed launch names the resource. A running run still reports the root cause. Nothing is left behind: `attempt`
checks that. A test that would harm the other tests makes its shortage in a program of its own.
"""

import contextlib
import gc
import os
import re
import resource
import signal
import subprocess
import threading
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from mpwatch import LaunchError, RunFailedError, run
from support import failing, functions
from support.acts import act
from support.process_state import difference, state
from support.programs import call, in_own_process


def attempt(fn=functions.rank, nprocs=2, *, short=lambda: lambda: None, **options):
    """Do a run, check that nothing is left of it, and return its result.

    `short` begins a shortage of a resource, and returns a function that ends it, since the check needs resources itself.
    """
    resource_tracker.ensure_running()  # it lives until the program ends
    before = state()
    end_shortage = short()
    try:
        result = _describe_result(fn, nprocs, options)
    finally:
        end_shortage()
    gc.collect()
    after = state()
    assert after == before, {name: difference(before[name], after[name]) for name in before if before[name] != after[name]}
    return result


def _describe_result(fn, nprocs, options):
    try:
        values = list(run(fn, nprocs, **options))
        return f"values {values}"
    except LaunchError as error:
        return f"LaunchError {error}"
    except RunFailedError as error:
        kind = error.root_cause.kind.name if error.root_cause else type(error).__name__
        return f"{kind} {error}"


def limit(which, soft):
    before, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft, hard))
    return lambda: resource.setrlimit(which, (before, hard))


def leave_descriptors(spare):
    """Limit this process to `spare` further descriptors. Return a function that restores the old limit."""
    taken = {int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    number = 0
    while number in taken or spare:
        spare -= number not in taken
        number += 1
    return limit(resource.RLIMIT_NOFILE, number)


def leave_memory(mib):
    """Limit the address space of this process to that many MiB more. Return a function that restores the old limit."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return limit(resource.RLIMIT_AS, used + (mib << 20))


def limit_file_size(size):
    """Python ignores SIGXFSZ, so a write beyond the limit fails with EFBIG. The limit counts for files in memory, too."""
    return limit(resource.RLIMIT_FSIZE, size)


SHORTAGES = {
    "no memory for the payload": (
        (len, 2, lambda: ("x" * (100 << 20),), leave_memory, 40),
        "LaunchError the call could not be packed: there is not enough memory; free some",
    ),
    "no memory for a value": (
        (bytes, 1, lambda: (150 << 20,), leave_memory, 250),
        "EXCEPTION rank 0 failed first: MemoryError",
    ),
    "shared memory is too large for a file": (
        (len, 2, lambda: (b"",), limit_file_size, 60_000),
        "LaunchError rank 0 could not be started: OSError: [Errno 27] File too large; raise the limit of file sizes",
    ),
}


@pytest.mark.parametrize("name", SHORTAGES)
@in_own_process
def test_the_error_names_the_resource_and_blames_no_argument(name):
    (fn, nprocs, args, shorten, size), expected = SHORTAGES[name]
    line = attempt(fn, nprocs, args=args(), short=partial(shorten, size))
    assert line.startswith(expected), line
    assert "args[" not in line
    assert "is of type" not in line


def test_every_step_of_a_launch_without_descriptors_raises_launch_error():
    """The number of free descriptors grows from zero until the run succeeds."""
    for spare in range(60):
        line = attempt(short=partial(leave_descriptors, spare))
        if line == "values [0, 1]":
            break
        assert re.match("LaunchError .*Too many open files.*ulimit -n", line), line
    assert 10 < spare < 40


FULL = "mount -t tmpfs -o size=4k mpwatch-test /dev/shm && echo x > /dev/shm/full && "
READ_ONLY = "mount --bind /tmp /tmp && mount -o remount,ro,bind /tmp && "


def succeed_and_fail():
    with pytest.raises(OSError, match="No space left on device"):
        Path("/dev/shm/more").write_bytes(bytes(8192))
    os.unlink("/dev/shm/more")
    print(attempt(len, args=(bytes(1 << 20),)))
    print(attempt(failing.raises_value_error, 1))


def test_runs_need_neither_dev_shm_nor_a_temporary_folder():
    within = ("unshare", "--mount", "sh", "-c", f'{FULL}{READ_ONLY}exec "$@"', "sh")
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mounts of its own can be made here")
    fine, failed, *_ = call(succeed_and_fail, within=within).stdout.splitlines()
    assert fine == "values [1048576, 1048576]"
    assert failed.startswith("EXCEPTION rank 0 failed first: ValueError: the batch is bad")


def reap_all_children():
    while True:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


VERDICTS = {  # the first one: if every exit code is lost. The others: if other code sometimes reaps a rank first
    "returns": ("values ['the value of rank 0', 'the value of rank 1']",),
    "raises_keyword_only_error": ("EXCEPTION rank 0 failed first: KeywordOnlyError: code 7: two arguments",),
    "exits": ("EXIT rank 0 ended with exit code 77 and no result",),
    "calls_os_exit": ("LOST rank 0 ", "EXIT rank 0 ended with exit code 77"),
    "is_killed": ("LOST rank 0 ", "SIGNAL rank 0 was killed by SIGKILL"),
    "waits": ("RunTimeoutError the run did not end",),
}


@pytest.mark.parametrize("how", ["SIGCHLD ignored", "reaped by others"])
@in_own_process
def test_a_host_that_loses_the_exit_codes_of_its_children(how):
    def act_on_rank_0(action):
        return act(action if failing.rank() == 0 or action == "returns" else "waits")

    if how == "SIGCHLD ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        threading.Thread(target=reap_all_children, daemon=True).start()
    for action, verdicts in VERDICTS.items():
        line = attempt(act_on_rank_0, args=(action,), timeout=0.7 if action == "waits" else None)
        assert line.startswith(verdicts if how == "reaped by others" else verdicts[:1]), line
    with pytest.raises(KeyboardInterrupt):
        attempt(failing.interrupts_its_watcher, grace_period=5)
    os._exit(0)  # at its end Python would wait for children
