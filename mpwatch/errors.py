"""The exceptions that mpwatch raises.

    MpwatchError <-- LaunchError
                 <-- RunFailedError <-- RunTimeoutError
                                    <-- ItemFailedError

Add a new exception class only if a program needs to handle the new exception in its own way.
"""

from types import TracebackType
from typing import Any

from mpwatch.results.failure import FailureKind, ItemFailure, ProcessFailure, name_item
from mpwatch.results.model import WorkerState
from mpwatch.results.run_result import RunResult, format_report
from mpwatch.wire.exceptions.source_lines import get_ipython_shell

TIMEOUT_EXIT_CODE = 124  # the exit status of timeout(1)


class MpwatchError(Exception):
    """The base class of all exceptions of mpwatch."""


class LaunchError(MpwatchError):
    """The exception that mpwatch raises if it cannot start the ranks.

    The text of a LaunchError says what went wrong, and what you can do.
    """


class RunFailedError(MpwatchError):
    """The exception for a run that did not succeed.

    `__cause__` is the exception of the rank that failed first, or None if that rank raised no exception. `str(error)` is the
    whole report, and `error.result` has the same as data.

    Args:
        result: everything known about the run.
    """

    def __init__(self, result: RunResult[Any]) -> None:
        super().__init__(result)
        self.result = result
        # here, since a pickle has the result only: another process unpickles the error with its cause
        self.__cause__ = result.root_cause.exception if result.root_cause else None

    @property
    def root_cause(self) -> ProcessFailure | None:
        """The failure of the rank that failed first. None if no rank failed, or if the timeout expired."""
        return self.result.root_cause

    @property
    def exit_code(self) -> int:
        """The exit status for a program that ends because of this error.

        The exit status is the `exit_code` of `root_cause`, the failure of the rank that failed first. If `root_cause` is
        None, the exit status is 1.
        """
        return self.root_cause.exit_code if self.root_cause else 1

    def __str__(self) -> str:
        return format_report(self.result)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.result.verdict!r})"

    def to_json(self) -> str:
        """Return `result.to_json()`."""
        return self.result.to_json()

    def _render_traceback_(self) -> list[str]:
        """The traceback for IPython, without the frames of mpwatch and of the rank, which are in that of `__cause__`."""
        lines: list[str] = get_ipython_shell().InteractiveTB.structured_traceback(
            type(self), self, _cut_frames_of_mpwatch(self.__traceback__)
        )
        return lines

    def _repr_html_(self) -> str:
        """Return the HTML with which a notebook shows this error."""
        return self.result._repr_html_()


class ItemFailedError(RunFailedError):
    """The exception that `mpwatch.map` raises for a failed item.

    `__cause__` is the exception that the function raised for this item, or None if the function raised no exception.

    Args:
        result: everything known about the call in which the item failed.
        item_failure: the item, and what happened to it.
    """

    def __init__(self, result: RunResult[Any], item_failure: ItemFailure) -> None:
        super().__init__(result)
        self.args = (result, item_failure)  # for pickle
        self.item_failure = item_failure

    def __str__(self) -> str:
        item = self.item_failure
        attempts = f" after {item.attempts} attempts" if item.attempts > 1 else ""
        reason = f"; {item.reason}" if item.reason else ""
        return f"{name_item(item.index, item.item)} failed{attempts}{reason}\n{super().__str__()}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.item_failure)!r})"


class RunTimeoutError(RunFailedError, TimeoutError):
    """The exception for a run that did not end within `timeout`."""

    @property
    def exit_code(self) -> int:
        """The exit status after a timeout is 124, as with the command `timeout`."""
        return TIMEOUT_EXIT_CODE


def make_error(result: RunResult[Any]) -> RunFailedError:
    timed_out = any(failure.kind is FailureKind.TIMEOUT for failure in result.failures.values())
    return (RunTimeoutError if timed_out else RunFailedError)(result)


def raise_if_failed(result: RunResult[Any]) -> None:
    """Raise RunFailedError or RunTimeoutError. In IPython it gets the rank's frames, so that `%debug` shows them."""
    __tracebackhide__ = True  # as in mpwatch.run
    if result.state is not WorkerState.SUCCEEDED:
        error = make_error(result)
        if error.__cause__ is not None and get_ipython_shell() is not None:
            error.__traceback__ = error.__cause__.__traceback__
        raise error


def _cut_frames_of_mpwatch(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames before the first one of mpwatch, or all if that comes first."""
    entries = []
    rest = trace
    while rest is not None and not str(rest.tb_frame.f_globals.get("__name__", "")).startswith("mpwatch."):
        entries.append(rest)
        rest = rest.tb_next
    copy = None
    for entry in reversed(entries):
        copy = TracebackType(copy, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return copy or trace
