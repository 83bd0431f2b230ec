"""Calls that cannot be interrupted: the wait for them ends at a deadline."""

import threading
import time

import pytest

from mpwatch.multinode.rendezvous.cancellable_wait import Deadline, call_with_deadline
from mpwatch.multinode.rendezvous.errors import CancelledError


def deadline_in(seconds):
    return Deadline(time.monotonic() + seconds, threading.Event())


@pytest.fixture
def slow(eventually):
    """A call that takes as long as the test, and then returns 7."""
    done = threading.Event()
    yield lambda: done.wait(60) and 7
    done.set()
    eventually(lambda: "slow" not in {thread.name for thread in threading.enumerate()})


def test_the_result_or_error_of_a_call_is_passed_on():
    assert call_with_deadline(lambda: 7, deadline_in(60), "quick") == 7
    with pytest.raises(ZeroDivisionError):
        call_with_deadline(lambda: 7 / 0, deadline_in(60), "quick")


def test_the_wait_ends_at_the_deadline(slow):
    checks = []
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        call_with_deadline(slow, deadline_in(0.3), "slow", on_check=checks.append)
    assert time.monotonic() - started < 1
    assert checks[0] is False
    assert checks[-1] is True


def test_a_wait_can_be_cancelled(slow):
    deadline = deadline_in(60)
    with pytest.raises(CancelledError):
        call_with_deadline(slow, deadline, "slow", on_check=lambda _: deadline.cancelled.set())


def test_a_result_that_comes_too_late_is_undone(eventually):
    go_on, undone = threading.Event(), []
    with pytest.raises(TimeoutError):
        call_with_deadline(lambda: go_on.wait(60) and 7, deadline_in(0), "slow", undo=undone.append)
    assert undone == []
    go_on.set()
    eventually(lambda: undone == [7])
    eventually(lambda: "slow" not in {thread.name for thread in threading.enumerate()})
