"""For programs that tests run: do a run, return its result in one line, and check that it has left and changed nothing."""

import gc
import os
import resource
from multiprocessing import resource_tracker

from mpwatch import LaunchError, RunFailedError, run
from support import functions
from support.process_state import difference, state

resource_tracker.ensure_running()  # it lives until the program ends, see conftest


def attempt(fn=functions.rank, nprocs=2, *, short=lambda: lambda: None, **options):
    """Do a run, check that nothing is left of it, and return its result.

    `short` begins a shortage of a resource, and returns a function that ends it, since the check needs resources itself.
    """
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
    except MemoryError:
        return "MemoryError"
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
