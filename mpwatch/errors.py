"""What mpwatch raises, by what the caller can do about it. Text is derived from the data when it is asked for."""

from typing import Any

from mpwatch.results.html import table_of
from mpwatch.results.model import FailureKind, ProcessFailure, WorkerState
from mpwatch.results.report import fates_text, report, verdict
from mpwatch.results.run_result import RunResult

TIMEOUT_EXIT_CODE = 124  # as timeout(1) has it


class MpwatchError(Exception):
    """The base of all errors that mpwatch raises of its own."""


class LaunchError(MpwatchError):
    """The ranks could not be started: says what could not be sent, found or reached, and how to mend it."""


class RunFailedError(MpwatchError):
    """A rank failed. Raised from that rank's own exception, if it had one.

    Args:
        result: all that is known of the run.
    """

    def __init__(self, result: RunResult[Any]) -> None:
        super().__init__(result)
        self.result = result

    @property
    def root_cause(self) -> ProcessFailure | None:
        """The failure that came first; None if no rank's own failure ended the run."""
        return self.result.root_cause

    @property
    def failures(self) -> dict[int, ProcessFailure]:
        """By global rank, every rank that failed."""
        return dict(self.result.failures)

    @property
    def verdict(self) -> str:
        """Which rank failed first, and why, or what else ended the run: the first line of the report."""
        return verdict(self.result)

    @property
    def fates(self) -> list[str]:
        """What became of the other ranks, a line for those with the same fate: `ranks 0-1: stopped by the watcher in …`."""
        return fates_text(self.result)

    @property
    def stacks(self) -> dict[int, str]:
        """By global rank, where those still at work were just before they were stopped: see `RunResult.stacks`."""
        return dict(self.result.stacks)

    @property
    def exit_code(self) -> int:
        """The exit status for a program that ends because of this: that of the rank that failed first, else 1."""
        return self.root_cause.exit_code if self.root_cause else 1

    def __str__(self) -> str:
        return report(self.result)

    def _repr_html_(self) -> str:
        """What a notebook shows of it as a value."""
        return table_of(self.result)


class RunTimeoutError(RunFailedError, TimeoutError):
    """The run did not end within `timeout`."""

    @property
    def exit_code(self) -> int:
        """124, as timeout(1) has it."""
        return TIMEOUT_EXIT_CODE


def make_error(result: RunResult[Any]) -> RunFailedError:
    """Return the error for a run that did not succeed. Its cause is the exception of the rank that failed first."""
    timed_out = any(failure.kind is FailureKind.TIMEOUT for failure in result.failures.values())
    error = (RunTimeoutError if timed_out else RunFailedError)(result)
    error.__cause__ = result.root_cause.exception if result.root_cause else None
    return error


def raise_if_failed(result: RunResult[Any]) -> None:
    """Raise RunFailedError or RunTimeoutError if the run did not succeed."""
    __tracebackhide__ = True  # see mpwatch.run
    if result.state is not WorkerState.SUCCEEDED:
        raise make_error(result)
