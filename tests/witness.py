"""For programs that tests run: what came of a run in one line, and that it has left nothing and changed nothing."""

import gc
import os
import resource
from multiprocessing import resource_tracker

import functions
from conftest import difference, state

from mpwatch import LaunchError, RunFailedError, run

resource_tracker.ensure_running()  # it stays, see conftest


def attempt(fn=functions.rank, nprocs=2, *, short=lambda: lambda: None, **options):
    """`short` begins a shortage, and returns what ends it, so that there is something to look with at what was left."""
    before = state()
    relief = short()
    try:
        came = _what_comes_of(fn, nprocs, options)
    finally:
        relief()
    gc.collect()
    after = state()
    assert after == before, {name: difference(before[name], after[name]) for name in before if before[name] != after[name]}
    return came


def _what_comes_of(fn, nprocs, options):
    try:
        values = list(run(fn, nprocs, **options))
        return f"values {values}"
    except LaunchError as error:
        return f"LaunchError {error}"
    except MemoryError:
        return "MemoryError"
    except RunFailedError as error:
        kind = error.root_cause.kind.name if error.root_cause else type(error).__name__
        return f"{kind} {error}"


def limit(which, soft):
    """Set a soft limit. Returns what lifts it again."""
    before, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft, hard))
    return lambda: resource.setrlimit(which, (before, hard))


def leave_descriptors(spare):
    """Let this process open so many more, and no more. Returns what lifts that again."""
    taken = {int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    number = 0
    while number in taken or spare:
        spare -= number not in taken
        number += 1
    return limit(resource.RLIMIT_NOFILE, number)
