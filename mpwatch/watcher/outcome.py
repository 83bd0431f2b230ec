"""What the user gets of a run or a call: its result, or what is to be raised."""

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import RunFailedError, RunTimeoutError
from ..results.model import FailureKind, WorkerState
from ..results.run_result import RunResult
from .watch import InterruptError

__all__ = ["outcome_of"]

T = TypeVar("T")


def outcome_of(watch: Callable[[], RunResult[T]], *, check: bool) -> RunResult[T]:
    """The result of what this runs. If `check`, a failed one is raised; signals that came do what they would have done."""
    __tracebackhide__ = True  # see run
    result = _result_of(watch)
    if check and result.state is not WorkerState.SUCCEEDED:
        raise _error(result)
    return result


def _result_of(watch: Callable[[], RunResult[T]]) -> RunResult[T]:
    __tracebackhide__ = True
    try:
        return watch()
    except InterruptError as interrupt:
        signals, result = interrupt.signals, interrupt.result
    # Outside the except block, so that a KeyboardInterrupt comes without a history, but for that of a failed run.
    failure = _error(result) if result.state is WorkerState.FAILED else None
    try:
        signals.deliver()
    except BaseException as error:
        if failure is not None:
            raise error from failure
        raise
    return result  # the host's handler has let it pass, and the run has been stopped all the same


def _error(result: RunResult[Any]) -> RunFailedError:
    timed_out = any(failure.kind is FailureKind.TIMEOUT for failure in result.failures.values())
    error = (RunTimeoutError if timed_out else RunFailedError)(result)
    error.__cause__ = result.root_cause.exception if result.root_cause else None
    return error
