"""`request_stop`: ask ranks to stop, in a rank or in the process that has started them."""

from mpwatch.watcher import running_calls
from mpwatch.worker import context


def request_stop() -> bool:
    """Ask all ranks to save and return: `should_stop` becomes True on all of them at one and the same step.

    In a rank it is for all ranks of the run, on all nodes, or of the call of a WorkerGroup. In the process that has started
    ranks it is for all runs and calls that are under way: an observer, another thread or a signal handler may call it. See
    `RunHandle.request_stop` and `CallHandle.request_stop` for one of them. A further request changes nothing.

    Returns:
        Whether there was anybody to ask. False in a process that is not a rank and has no ranks at work.
    """
    is_asked = context.request_stop()
    return running_calls.request_stop("request_stop()") if is_asked is None else is_asked
