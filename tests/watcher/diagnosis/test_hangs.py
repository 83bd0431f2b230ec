"""`report()`, `heartbeat()` and `heartbeat_timeout`: a silent rank is the root cause, with the stacks of all ranks."""

import os
import time

import pytest

import mpwatch
from mpwatch import FailureKind
from support import failing
from support.process_state import SPAWN
from watcher.diagnosis import failing_functions as fn


def test_the_last_reports_are_in_the_result_also_that_of_a_killed_rank():
    def report_steps(has_reported):
        for step in range(3):
            mpwatch.report(step=step, total=3, loss=1 / (step + 1), ready=True)
        if failing.rank() == 0:
            has_reported.set()
            failing.wait_to_be_stopped()
        mpwatch.report(step=7)
        has_reported.wait()
        failing.is_killed()

    result = mpwatch.run(report_steps, 2, args=(SPAWN.Event(),), check=False)
    first, second = result.progress[0], result.progress[1]
    assert (first.step, first.total, first.metrics) == (2, 3, {"loss": 1 / 3, "ready": 1.0})
    assert (second.step, second.total, second.metrics) == (7, None, {})
    assert 0 < first.elapsed < 60
    mpwatch.heartbeat()  # does nothing outside a rank
    mpwatch.report(step=1)


@pytest.mark.usefixtures("_wait_for_all_stacks")
@pytest.mark.linux
def test_silent_ranks_are_failures_with_all_stacks():
    began, text = time.monotonic(), r"^rank [123] was silent for [\d.]+ s \(heartbeat_timeout=1\)"
    options = {"heartbeat_timeout": 1.0, "grace_period": 0.5}
    with pytest.raises(mpwatch.RunFailedError, match=text) as failed:
        mpwatch.run(fn.stop_heartbeats_in_three_ways, 4, args=(SPAWN.Barrier(4),), **options)
    root, result = failed.value.root_cause, failed.value.result
    assert (root.kind, root.exit_code, root.exception) == (FailureKind.HANG, 1, None)
    assert (root.rank in result.failures, set(result.failures) <= {1, 2, 3}) == (True, True)
    stacks = result.stacks
    assert " in beat_forever" in stacks[0]
    assert " in wait_to_be_stopped" in stacks[1]
    assert " in hold_the_gil" in stacks[2]
    assert stacks[3] == "suspended, by SIGSTOP or SIGTSTP"
    assert all(failure.stack == stacks[rank] for rank, failure in result.failures.items())
    assert time.monotonic() - began < 20


def test_a_rank_that_has_returned_or_never_sent_a_heartbeat_has_no_limit():
    class SlowToPickle:
        def __reduce__(self):
            time.sleep(0.6)  # longer than the limit; no heartbeat is sent here
            return str, ("at last",)

    def have_no_limit():
        if failing.rank() == 0:
            mpwatch.heartbeat()
            return SlowToPickle()
        time.sleep(0.6)
        return "never"

    assert list(mpwatch.run(have_no_limit, 2, heartbeat_timeout=0.1)) == ["at last", "never"]


def test_heartbeats_of_a_forked_helper_do_not_count():
    def beat_in_a_fork():
        mpwatch.heartbeat()
        if os.fork() == 0:
            fn.beat_forever()
        failing.wait_to_be_stopped()

    with pytest.raises(mpwatch.RunFailedError, match="was silent for"):
        mpwatch.run(beat_in_a_fork, 1, heartbeat_timeout=0.2)


def test_a_heartbeat_timeout_without_heartbeats_is_warned_about_once(caplog):
    with mpwatch.WorkerGroup(2, heartbeat_timeout=0.2) as group:
        for _ in range(2):
            group.run(time.sleep, (0.6,))
    text = "no rank has called report() or heartbeat() in 0.2 s, so heartbeat_timeout=0.2 does not apply yet"
    assert caplog.messages == [text]
