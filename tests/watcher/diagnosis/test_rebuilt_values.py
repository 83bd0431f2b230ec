"""Return values that cannot be rebuilt in the caller: the failure says why. No process is started."""

import errno
import importlib
import sys

import pytest

from mpwatch import FailureKind
from mpwatch.watcher.diagnosis.diagnose import diagnose
from mpwatch.watcher.machine.transitions import StopReason
from support.observations import make_observations, rank_that_returned


class NeedsState:
    def __getstate__(self):
        return {"x": 1}

    def __setstate__(self, _):
        raise LookupError("not here\nbut there")


class NeedsArgument:
    def __new__(cls, _):
        return object.__new__(cls)


class CallsWhenRebuilt:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


class HasGone:
    pass


def raise_error(error):
    raise error


GONE = (
    f"module {__name__!r} has no attribute 'HasGone'"
    if sys.version_info >= (3, 14)
    else f"Can't get attribute 'HasGone' on {sys.modules[__name__]}"
)


def diagnose_value(value):
    return diagnose(make_observations(rank_that_returned(value), stop_reason=StopReason.SUCCEEDED, stopped_at=None))


@pytest.mark.parametrize(
    ("value", "kind", "why"),
    [
        (
            NeedsState(),
            "NeedsState",
            "watcher.diagnosis.test_rebuilt_values.NeedsState.__setstate__ raised LookupError: not here",
        ),
        (
            {"a": [NeedsState()]},
            "dict",
            "watcher.diagnosis.test_rebuilt_values.NeedsState.__setstate__ raised LookupError: not here",
        ),
        (
            NeedsArgument(1),
            "NeedsArgument",
            "TypeError: NeedsArgument.__new__() missing 1 required positional argument: '_'",
        ),
        (CallsWhenRebuilt(int, "x"), "CallsWhenRebuilt", "ValueError: invalid literal for int() with base 10: 'x'"),
        (CallsWhenRebuilt(sys.exit, 3), "CallsWhenRebuilt", "SystemExit: 3"),
        (CallsWhenRebuilt(importlib.import_module, "a.b"), "CallsWhenRebuilt", "ModuleNotFoundError: No module named 'a'"),
        (HasGone(), "HasGone", f"AttributeError: {GONE}"),
    ],
)
def test_a_value_that_cannot_be_rebuilt(monkeypatch, value, kind, why):
    given = make_observations(rank_that_returned(value), stop_reason=StopReason.SUCCEEDED, stopped_at=None)
    monkeypatch.delattr(sys.modules[__name__], "HasGone")
    failure = diagnose(given).root_cause
    assert (failure.rank, failure.kind, failure.exit_code) == (0, FailureKind.EXCEPTION, 1)
    kind = kind if kind == "dict" else f"watcher.diagnosis.test_rebuilt_values.{kind}"
    assert failure.summary == (
        f"TypeError: its return value cannot be rebuilt in the caller: it is of type {kind} ({why}); return plain data instead"
    )
    assert str(failure.exception) == failure.summary.removeprefix("TypeError: ")
    assert type(failure.exception.__cause__).__name__ in why
    assert "The above exception was the direct cause" in failure.traceback


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            MemoryError(),
            "MemoryError: the return value could not be rebuilt in the caller: there is not enough memory; free some",
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "OSError: the return value could not be rebuilt in the caller: OSError: [Errno 24] Too many open files; raise",
        ),
    ],
)
def test_a_value_that_cannot_be_rebuilt_for_lack_of_a_resource(error, text):
    failure = diagnose_value(CallsWhenRebuilt(raise_error, error)).root_cause
    assert failure.summary.startswith(text)
    assert type(failure.exception) is type(failure.exception.__cause__)


def test_a_keyboard_interrupt_is_no_failure_of_the_value_that_is_being_rebuilt():
    with pytest.raises(KeyboardInterrupt):
        diagnose_value(CallsWhenRebuilt(raise_error, KeyboardInterrupt()))
