"""`RestartPolicy`: whether ranks that have failed are started anew, which of them, and when. Data, validated once."""

from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from mpwatch.options.validation import check_count, check_fraction, check_seconds, is_async
from mpwatch.results.model import FailureKind, ProcessFailure

# What a function raises because of how it is written, and would raise again: tried again only if it had come some way.
PROGRAMMING_ERRORS = (TypeError, NameError, AttributeError, ImportError, SyntaxError, NotImplementedError)
Cause = type[BaseException] | FailureKind
RetryIf = Cause | Collection[Cause] | Callable[[ProcessFailure], bool]


@dataclass(frozen=True)
class RestartPolicy:
    """What happens when a rank has failed: the `restart_policy` of `mpwatch.run`.

    Raises TypeError or ValueError naming the argument and the value.
    """

    max_restarts: int = 3
    """How often the group may be started anew; with scope="worker", each rank for itself."""
    _: KW_ONLY
    scope: Literal["group", "worker"] = "group"
    """"group": all ranks are stopped and started again, which collectives need. "worker": only the rank that failed is
    replaced, for ranks that do not talk to one another."""
    delay: float = 0.0
    """Seconds before the first restart; twice as long before each further one."""
    max_delay: float = 60.0
    """Seconds that a delay never exceeds."""
    jitter: float = 0.1
    """Fraction by which each delay is made longer or shorter at random, from 0 to 1."""
    retry_if: RetryIf | None = None
    """Which failures are worth another try, judged by the one that came first: exception types, FailureKinds, a collection
    of them, or a function from ProcessFailure to bool, called in the caller's thread. None: all but START, and but
    programming errors (TypeError, NameError, AttributeError, ImportError, SyntaxError, NotImplementedError) that a rank
    raises before its first heartbeat or report. A LaunchError, a timeout and an interrupt always end the run. While
    the function runs, signals wait, but for a second Ctrl-C."""
    reset_after: float | None = None
    """Seconds after which ranks that were healthy get all their restarts back, and the first delay. None: never."""
    max_no_progress: int | None = None
    """Give up when so many restarts in a row reached no `report(step=...)` beyond the furthest before. None: no limit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_restarts", check_count("max_restarts", self.max_restarts, at_least=0))
        if self.scope not in ("group", "worker"):
            raise ValueError(f"scope must be 'group' or 'worker', not {self.scope!r}")
        check_seconds("delay", self.delay, at_least="0 or more")
        check_seconds("max_delay", self.max_delay, at_least="0 or more")
        check_fraction("jitter", self.jitter)
        _check_retry_if(self.retry_if)
        if self.reset_after is not None:
            check_seconds("reset_after", self.reset_after, at_least="more than 0")
        if self.max_no_progress is not None:
            limit = check_count("max_no_progress", self.max_no_progress, at_least=1)
            object.__setattr__(self, "max_no_progress", limit)

    @property
    def causes(self) -> frozenset[Cause]:
        """What `retry_if` names; empty if it is a function, or None."""
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
    elif not callable(retry_if) or isinstance(retry_if, type):
        raise TypeError(f"retry_if must be {what}, not {retry_if!r:.200}")
    elif is_async(retry_if):
        raise TypeError(f"retry_if must be an ordinary function; {retry_if!r:.200} is async def, and nobody would await it")
