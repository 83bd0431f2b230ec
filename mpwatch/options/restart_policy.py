"""`RestartPolicy` says after which failures ranks are restarted, how often, and after which delay."""

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from mpwatch.options.validation import check_count, check_fraction, check_function, check_optional_seconds, check_seconds
from mpwatch.results.failure import FailureKind, ProcessFailure

# An error in the code would be raised again. After such an error ranks are restarted only if they had made progress.
PROGRAMMING_ERRORS = (TypeError, NameError, AttributeError, ImportError, SyntaxError, NotImplementedError)
Cause = type[BaseException] | FailureKind
RetryIf = Cause | Collection[Cause] | Callable[[ProcessFailure], bool]


@dataclass(frozen=True)
class RestartPolicy:
    """The option `max_restarts` of `mpwatch.run`, with rules. `max_restarts=3` means `max_restarts=RestartPolicy(3)`.

    Args:
        max_restarts: how many times all ranks may be restarted. With scope="worker", it is how many times each rank may be
            restarted.
        scope: "group" means that all ranks are stopped and restarted together. Ranks that use collectives need this value.
            "worker" means that only the rank that failed is restarted. Use it only for ranks that do not communicate.
        delay: seconds before the first restart. The delay doubles before each further restart.
        max_delay: the longest delay, in seconds.
        jitter: a fraction from 0 to 1. Each delay is made longer or shorter at random, by at most this fraction.
        retry_if: after which failures ranks are restarted. The first failure of the attempt decides. The value is an
            exception type, a FailureKind, a collection of these, or a function from ProcessFailure to bool. The function is
            called in the caller's thread. While the function runs, mpwatch defers signals, except a second Ctrl-C. None
            means that ranks are restarted after every failure except two kinds. The first kind is FailureKind.START. The
            second kind is a programming error (TypeError, NameError, AttributeError, ImportError, SyntaxError,
            NotImplementedError) that a rank raises before its first heartbeat or report. A LaunchError, a timeout and an
            interrupt always end the run.
        reset_after: if all ranks were healthy for this many seconds, restarts and delays are counted from the start again.
            None means never.
        max_no_progress: the run ends after this many restarts in a row without progress. A restart makes progress if a rank
            reports a step above the highest earlier step. None means no limit.

    Raises TypeError or ValueError if an argument is invalid. The error text contains the name and the value of the invalid
    argument.
    """

    max_restarts: int = 3
    _: KW_ONLY
    scope: Literal["group", "worker"] = "group"
    delay: float = 0.0
    max_delay: float = 60.0
    jitter: float = 0.1
    retry_if: RetryIf | None = None
    reset_after: float | None = None
    max_no_progress: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_restarts", check_count("max_restarts", self.max_restarts, at_least=0))
        if self.scope not in ("group", "worker"):
            raise ValueError(f"scope must be 'group' or 'worker', not {self.scope!r}")
        check_seconds("delay", self.delay, at_least="0 or more")
        check_seconds("max_delay", self.max_delay, at_least="0 or more")
        check_fraction("jitter", self.jitter)
        _check_retry_if(self.retry_if)
        check_optional_seconds("reset_after", self.reset_after)
        if self.max_no_progress is not None:
            limit = check_count("max_no_progress", self.max_no_progress, at_least=1)
            object.__setattr__(self, "max_no_progress", limit)

    @property
    def causes(self) -> frozenset[Cause]:
        """The exception types and FailureKinds in `retry_if`. If `retry_if` is a function, `causes` is empty."""
        if self.retry_if is None:
            return frozenset()
        if isinstance(self.retry_if, Collection) and not isinstance(self.retry_if, type):
            return frozenset(self.retry_if)
        return frozenset([self.retry_if]) if _is_cause(self.retry_if) else frozenset()  # type: ignore[list-item]


def _is_cause(thing: object) -> bool:
    return isinstance(thing, FailureKind) or (isinstance(thing, type) and issubclass(thing, BaseException))


def _check_retry_if(retry_if: object) -> None:
    if retry_if is None or _is_cause(retry_if):
        return
    what = "exception types, FailureKinds, a collection of them, or a function that takes a ProcessFailure"
    if isinstance(retry_if, Collection) and not isinstance(retry_if, str | bytes | type):
        wrong = [cause for cause in retry_if if not _is_cause(cause)]
        if wrong or not retry_if:
            raise TypeError(f"retry_if must be {what}, not {retry_if!r:.200}")
    else:
        check_function("retry_if", retry_if, what)
