"""Functions for ranks whose events are observed. A rank imports this module, so it imports little."""

import signal

import mpwatch


def wait_to_be_stopped():
    while True:
        signal.pause()


def fails(failures, barriers=()):
    """Raise on rank 1 in the first `failures` attempts, with barriers once both ranks run; rank 0 waits."""
    me = mpwatch.current_worker()
    if barriers:
        barriers[me.restart_count].wait()
    if me.restart_count < failures:
        if me.rank == 1:
            raise ValueError(f"attempt {me.restart_count}")
        wait_to_be_stopped()


def raises_by_itself():
    """Raise on rank 1 in its first attempt. Return the number of the attempt."""
    me = mpwatch.current_worker()
    if me.rank > me.restart_count:
        raise ValueError("the first attempt")
    return me.restart_count
