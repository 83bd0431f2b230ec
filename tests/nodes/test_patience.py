"""Waiting for what cannot be interrupted, as long as it makes sense."""

import threading
import time

import pytest

from mpwatch.multinode.rendezvous.cancellable_wait import Deadline, wait_for
from mpwatch.multinode.rendezvous.errors import CancelledError


def limit(seconds):
    return Deadline(time.monotonic() + seconds, threading.Event())


@pytest.fixture
def slow(eventually):
    """Something that takes as long as the test does, and then answers 7."""
    done = threading.Event()
    yield lambda: done.wait(60) and 7
    done.set()
    eventually(lambda: "slow" not in {thread.name for thread in threading.enumerate()})


def test_what_a_call_returns_or_raises_is_passed_on():
    assert wait_for(lambda: 7, limit(60), "quick") == 7
    with pytest.raises(ZeroDivisionError):
        wait_for(lambda: 7 / 0, limit(60), "quick")


def test_nobody_waits_longer_than_the_limit_says(slow):
    late = []
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        wait_for(slow, limit(0.3), "slow", meanwhile=late.append)
    assert time.monotonic() - started < 1
    assert late[0] is False
    assert late[-1] is True


def test_who_waits_can_be_told_to_stop(slow):
    waiting = limit(60)
    with pytest.raises(CancelledError):
        wait_for(slow, waiting, "slow", meanwhile=lambda _: waiting.cancelled.set())


def test_what_comes_too_late_is_given_back(eventually):
    go_on, given_back = threading.Event(), []
    with pytest.raises(TimeoutError):
        wait_for(lambda: go_on.wait(60) and 7, limit(0), "slow", undo=given_back.append)
    assert given_back == []
    go_on.set()
    eventually(lambda: given_back == [7])
    eventually(lambda: "slow" not in {thread.name for thread in threading.enumerate()})
