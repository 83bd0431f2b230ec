"""Jobs of several nodes under what nobody would do to them on purpose, and some would."""

import pytest

from . import tasks


def assert_success(outcomes):
    for outcome in outcomes:
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")


@pytest.mark.parametrize("step", [-5, 1 << 60])
def test_any_step_may_be_reported(job, step):
    """A message that the chair could not read would be waited for until the end of days."""
    job.start_several(2, tasks.reports, args=(step,))
    assert_success(job.outcomes())


def test_environments_that_were_made_too_late_are_for_no_other_attempt(job):
    """While the ranks of the other node are being stopped, those of this one come to be ready to start."""
    options = {"max_restarts": 1, "grace_period": 2.5}
    job.start(tasks.fails_first_time, 2, **options)
    job.start(tasks.fails_first_time, 2, env="takes_its_time", **options)
    outcomes = job.outcomes()
    assert_success(outcomes)
    assert {worker["restart_count"] for outcome in outcomes for worker in outcome.workers} == {1}
