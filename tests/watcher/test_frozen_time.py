"""Limits and delays while a tool for tests has replaced the clocks of Python."""

import re
from pathlib import Path

import pytest
from freezegun import freeze_time

import mpwatch
from support.failing import wait_to_be_stopped
from watcher.frozen_functions import is_deaf_to_sigterm, raises_at_first, sends_a_heartbeat_in_frozen_time

with_changed_time = pytest.mark.parametrize("is_ticking", [False, True], ids=["frozen", "ticking"])


@pytest.fixture(scope="module", autouse=True)
def _load_lazy_modules():
    """Let freezegun read each attribute of each module, which loads modules, before the state of this process is compared."""
    with freeze_time("2020-01-01"):
        pass


@with_changed_time
@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (is_deaf_to_sigterm, {"timeout": 0.5}, "within timeout=0.5 s"),  # and `grace_period` has to expire
        (sends_a_heartbeat_in_frozen_time, {"heartbeat_timeout": 0.2}, r"was silent for 0\.[2-9]"),
    ],
)
def test_a_limit_expires(function, options, message, is_ticking):
    with freeze_time("2020-01-01", tick=is_ticking), pytest.raises(mpwatch.RunFailedError, match=message):
        mpwatch.run(function, 1, grace_period=0.2, **options)


@with_changed_time
def test_a_restart_is_not_delayed_for_ever(is_ticking):
    policy = mpwatch.RestartPolicy(max_restarts=1, delay=0.05)
    with freeze_time("2020-01-01", tick=is_ticking):
        assert list(mpwatch.run(raises_at_first, 1, max_restarts=policy)) == [None]


@with_changed_time
def test_waiting_for_a_result_has_a_limit(is_ticking):
    with freeze_time("2020-01-01", tick=is_ticking):
        handle = mpwatch.submit(wait_to_be_stopped, 1, grace_period=0.1)
        with pytest.raises(TimeoutError):
            handle.result(0.1)
        handle.terminate()


@with_changed_time
def test_a_call_of_a_group_has_a_limit(is_ticking):
    with (
        freeze_time("2020-01-01", tick=is_ticking),
        mpwatch.WorkerGroup(1, grace_period=0.1) as group,
        pytest.raises(mpwatch.RunFailedError, match=r"timeout=0\.2 s"),
    ):
        group.run(wait_to_be_stopped, timeout=0.2)


def test_no_module_but_the_clock_reads_a_clock_that_such_tools_replace():
    package = Path(mpwatch.__file__).parent
    pattern = re.compile(r"\btime\.(monotonic|perf_counter)|from time import")
    assert [path.name for path in package.rglob("*.py") if pattern.search(path.read_text())] == ["clock.py"]
