"""`QueueWait` measures how long a job waits until the cluster starts the first node of the job. Pure.

A job can wait for days in the queue of a cluster. The driver logs a warning after 10, 20, 40, 80, ... seconds of waiting.
Each warning says what the job waits for.
"""

import math

import mpwatch

FIRST_REPORT_SECONDS = 10.0


class QueueWait:
    """One wait, until `deadline`. The next report is due at `report_at`."""

    def __init__(self, timeout: float | None, now: float) -> None:
        self._timeout, self._began_at = timeout, now
        self.deadline = math.inf if timeout is None else now + timeout
        self.report_at = now + FIRST_REPORT_SECONDS

    def take_report(self, what: str, now: float) -> str:
        """Return the text of a warning if one is due, or "". `what` is such as "the cluster has 1 free node of 2"."""
        if now < self.report_at:
            return ""
        waited = now - self._began_at
        self.report_at = now + waited
        limit = "without limit" if self._timeout is None else f"for up to {self._timeout:g} s"
        return f"{what}. The job has waited for {waited:.0f} s, and waits {limit} (queue_timeout)"

    def make_error(self, what: str) -> mpwatch.LaunchError:
        return mpwatch.LaunchError(f"{what}. The job has waited for {self._timeout:g} s (queue_timeout)")
