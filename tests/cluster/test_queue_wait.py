"""How long a job waits for its cluster, and what it reports meanwhile."""

import math

import mpwatch
from mpwatch.cluster.queue_wait import QueueWait

DAY = 86_400.0
WHAT = "job 101 has not begun"


def test_a_wait_has_no_limit_and_few_reports():
    wait = QueueWait(None, now=100.0)
    assert wait.deadline == math.inf
    reports = []
    for _ in range(15):
        assert wait.take_report(WHAT, wait.report_at - 0.01) == ""
        reports.append(wait.take_report(WHAT, wait.report_at))
    assert reports[0] == "job 101 has not begun. The job has waited for 10 s, and waits without limit (queue_timeout)"
    assert "has waited for 20 s" in reports[1]
    assert "has waited for 40 s" in reports[2]
    assert wait.report_at > 3 * DAY


def test_a_limit_is_in_the_report_and_in_the_error():
    wait = QueueWait(600, now=100.0)
    assert wait.deadline == 700.0
    assert wait.take_report(WHAT, 115.0).endswith("The job has waited for 15 s, and waits for up to 600 s (queue_timeout)")
    error = wait.make_error(WHAT)
    assert type(error) is mpwatch.LaunchError
    assert str(error) == "job 101 has not begun. The job has waited for 600 s (queue_timeout)"
