"""`QueueWait`: the wait of a job until the cluster starts its first node. Pure.

A job can wait for days in the queue of a cluster. So this wait has no limit by default. Warnings say what the job waits for.
The first warning comes after 10 seconds. The next warnings come after 20, 40 and 80 seconds, and so on.
"""

import math

import mpwatch

FIRST_REPORT_SECONDS = 10.0


class QueueWait:
    """One wait.

    Args:
        timeout: the option `queue_timeout`. None means no limit.
        now: when the wait begins, in seconds of CLOCK_MONOTONIC.

    Attributes:
        deadline: when it ends.
        report_at: when the next report is due.
    """

    def __init__(self, timeout: float | None, now: float) -> None:
        self._timeout = timeout
        self._began_at = now
        self.deadline = math.inf if timeout is None else now + timeout
        self.report_at = now + FIRST_REPORT_SECONDS

    def take_report(self, what: str, now: float) -> str:
        """Return a report if a report is due, and otherwise "". `what` is a sentence without its full stop."""
        if now < self.report_at:
            return ""
        waited = now - self._began_at
        self.report_at = now + waited
        limit = "without limit" if self._timeout is None else f"for up to {self._timeout:g} s"
        return f"{what}. The job has waited for {waited:.0f} s, and waits {limit} (queue_timeout)"

    def make_error(self, what: str) -> mpwatch.LaunchError:
        """Return the error to raise when the deadline has passed."""
        return mpwatch.LaunchError(f"{what}. The job has waited for {self._timeout:g} s (queue_timeout)")
