"""How long a job waits until the cluster starts its first node, which can take days in the queue of a cluster."""

import logging
import math

import mpwatch
from mpwatch.os_support.clock import monotonic
from mpwatch.watcher.observers.deferred_log import log_now

FIRST_REPORT_SECONDS = 10.0  # then after 20, 40, 80, ... seconds


class QueueWait:
    """One wait, until `deadline`. `timeout` is the option `queue_timeout`; None: no limit."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout, self._began_at = timeout, monotonic()
        self.deadline = math.inf if timeout is None else self._began_at + timeout
        self.report_at = self._began_at + FIRST_REPORT_SECONDS

    def report(self, what: str) -> None:
        """Log a warning, if one is due. `what` is such as "the cluster has 1 free node, but the job needs 2"."""
        now = monotonic()
        if now >= self.report_at:
            waited = now - self._began_at
            self.report_at = now + waited
            limit = "without limit" if self._timeout is None else f"for up to {self._timeout:g} s"
            text = "%s. The job has waited for %.0f s, and waits %s (queue_timeout)"
            log_now(logging.WARNING, text, what, waited, limit)

    def make_error(self, what: str) -> mpwatch.LaunchError:
        return mpwatch.LaunchError(f"{what}. The job has waited for {self._timeout:g} s (queue_timeout)")
