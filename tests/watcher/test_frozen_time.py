"""Limits and delays while a tool for tests has replaced the clocks of Python."""

import re
import signal

import pytest
from freezegun import freeze_time

import mpwatch
from mpwatch import FailureKind, RestartPolicy
from support.failing import wait_to_be_stopped
from support.programs import in_own_process


def is_deaf_to_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_to_be_stopped()


def is_silent_in_frozen_time_in_the_first_attempt():
    if mpwatch.current_worker().restart_count == 0:
        with freeze_time("2020-01-01"):
            mpwatch.heartbeat()
            wait_to_be_stopped()


@pytest.mark.parametrize("is_ticking", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["frozen", "ticking"])
@in_own_process  # freezegun reads each attribute of each module, and those of some packages load more modules
def test_limits_grace_periods_and_delays_expire(is_ticking):
    with freeze_time("2020-01-01", tick=is_ticking):
        with pytest.raises(mpwatch.RunTimeoutError, match=r"within timeout=0\.5 s"):
            mpwatch.run(is_deaf_to_sigterm, 1, grace_period=0.2, timeout=0.5)
        with (
            mpwatch.WorkerGroup(1, grace_period=0.1) as group,
            pytest.raises(mpwatch.RunTimeoutError, match=r"timeout=0\.2 s"),
        ):
            group.run(wait_to_be_stopped, timeout=0.2)
        handle = mpwatch.submit(wait_to_be_stopped, 1, grace_period=0.1)
        with pytest.raises(TimeoutError):
            handle.result(0.1)
        handle.terminate()
        options = {"max_restarts": RestartPolicy(1, delay=0.05, retry_if=FailureKind.HANG), "heartbeat_timeout": 0.2}
        result = mpwatch.run(is_silent_in_frozen_time_in_the_first_attempt, 1, grace_period=0.2, **options)
        assert re.search(r"was silent for 0\.[2-9]", str(result.attempts[0]))
