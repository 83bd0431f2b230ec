"""What the live view shows for statuses of ranks."""

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("rich")

from mpwatch import Lateness, WorkerState
from mpwatch.live_view import formatting
from mpwatch.live_view.live import LiveView
from mpwatch.live_view.model import SnapshotBuilder
from mpwatch.live_view.notebook import render_html
from mpwatch.live_view.rich_rows import render
from mpwatch.results.model import RankStatus
from mpwatch.wire.shared_memory import Report

MB = 1_000_000
DASH = formatting.UNKNOWN
LATE = Lateness(rank=1, share=0.42)
DONE = {"state": WorkerState.SUCCEEDED}


def status(rank=0, step=None, at=0.0, now=None, **more):
    """Return the status at time `now` of a rank that reported this step at time `at`."""
    total, metrics = more.pop("total", 100), more.pop("metrics", {})
    report = None if step is None else Report(at, step, total, metrics)
    fields = {"state": WorkerState.HEALTHY, "pid": 100 + rank, "seen_at": at if now is None else now, **more}
    return RankStatus(rank=rank, report=report, **{"local_rank": rank, **fields})


def statuses_with_steps(*steps, **more):
    return [status(rank, step, **more) for rank, step in enumerate(steps)]


def snapshot_of(*statuses):
    return SnapshotBuilder().update(statuses)


def row_cells(*statuses):
    """Return the texts for one rank with these statuses, one after another."""
    builder = SnapshotBuilder()
    return [formatting.format_row(builder.update([seen]).rows[0]) for seen in statuses][-1]


@pytest.mark.parametrize(
    ("reports", "now", "expected"),  # step by time
    [
        ({second: 2 * second if second <= 20 else 40 + 8 * (second - 20) for second in range(31)}, 30.9, 8.0),
        ({0: 0, 5: 10}, 105, 0.1),  # it falls when no report comes
        ({0: 5, 1: 6, 2: 1, 3: 4}, 3, 3.0),
    ],
)
def test_a_rate_is_the_mean_of_ten_seconds_by_the_times_of_the_reports(reports, now, expected):
    builder = SnapshotBuilder()
    for at, step in reports.items():
        builder.update([status(step=step, at=at)])
    (row,) = builder.update([status(step=step, at=at, now=now)]).rows
    assert row.rate == (expected and pytest.approx(expected))


def test_the_row_of_a_rank():
    # the cells: rank, state, step, steps/s, metrics, memory, CPU, heartbeat
    started = status(memory=5 * MB, cpu_seconds=10.0, heartbeat_at=0.0)
    late = {"state": WorkerState.UNHEALTHY, "cpu_seconds": 13.0, "memory": 1500 * MB, "heartbeat_at": 1.0}
    later = status(step=7, total=None, now=2.0, restart_count=2, **late)
    assert row_cells(status()) == ("0", "running", DASH, DASH, "", DASH, DASH, DASH)
    assert row_cells(started, later) == ("0", "late, restart 2", "7", DASH, "", "1.5 GB", "150 %", "1.0 s ago")
    ended = status(now=3.0, heartbeat_at=0.0, state=WorkerState.SUCCEEDED)
    assert row_cells(started, ended) == ("0", "returned", DASH, DASH, "", "5 MB", DASH, DASH)
    assert row_cells(status(restart_count=2, lateness=LATE))[1] == "running, restart 2, slow (42 %)"


def test_names_of_metrics_are_escaped():
    names = {"\x1b[2Jloss\n": 1.0, "[red]": 2.0, "<b>": 3.0, "\ud800": 4.0, "x" * 100: 5.0, "sixth": 6.0, "seventh": 7.0}
    seen = status(step=1, metrics=names)
    assert row_cells(seen)[4] == rf"\x1b[2Jloss\n 1, [red] 2, <b> 3, \ud800 4, {'x' * 40} 5, sixth 6, …"
    html = render_html(snapshot_of(seen))
    assert ("&lt;b&gt; 3" in html, "<b> 3" in html) == (True, False)


THREE_STATES = [status(rank, state=WorkerState[name]) for rank, name in enumerate(("INIT", "FAILED", "STOPPED"))]
WITH_LOSS = [status(rank, 1, metrics={"loss": loss, "lr": 0.1}) for rank, loss in enumerate((1.0, 2.0, 6.0))]


@pytest.mark.parametrize(
    ("line", "statuses"),
    [
        ("no ranks yet: waiting for the other nodes", []),
        ("3 ranks: 1 starting, 1 stopped, 1 failed", THREE_STATES),
        # the slowest running rank: no rank waits for one that has returned
        (
            "step 20 of 100 (20 %); 5 ranks: 4 running, 1 returned",
            [*statuses_with_steps(30, 20, 25), status(3, 5, **DONE), status(4)],
        ),
        # ranks with different totals are compared by the part that they have done
        ("step 30 of 100 (30 %); 3 ranks running", [status(0, 30), status(1, 20, total=40), status(2, 40, total=None)]),
        ("step 1999 of 2000 (99 %); 1 rank running", [status(0, 1999, total=2000)]),
        ("step 1 of 100 (1 %); loss 3, lr 0.1; 3 ranks running", WITH_LOSS),
    ],
)
def test_the_overall_line(line, statuses):
    assert formatting.format_overall(snapshot_of(*statuses)) == line


def test_more_than_sixteen_ranks_are_summarized():
    assert not formatting.is_summarized(snapshot_of(*statuses_with_steps(*range(16))))
    assert formatting.is_summarized(snapshot_of(*statuses_with_steps(*range(17))))
    assert "maximum 16" in render_html(snapshot_of(*statuses_with_steps(*range(17))))
    builder = SnapshotBuilder()
    usage = {"memory": 2000 * MB, "heartbeat_at": 9.0}
    builder.update(statuses_with_steps(*range(64), at=8.0, cpu_seconds=1.0, **usage))
    ranks = statuses_with_steps(*range(100, 162), at=10.0, cpu_seconds=3.0, **usage)
    ranks[0] = replace(ranks[0], lateness=LATE)
    ranks += [status(62, 500, now=10.0, **DONE), status(63, now=10.0, state=WorkerState.FAILED)]
    assert formatting.format_summary(builder.update(ranks)) == [
        ("ranks", "64 ranks: 62 running, 1 returned, 1 failed"),
        ("steps", "minimum 100, median 131, maximum 500"),
        ("slowest", "rank 0 (100 of 100), rank 1 (101 of 100), rank 2 (102 of 100)"),
        ("slow", "rank 1: the others wait for 42 % of the time"),
        ("all ranks", "memory 128 GB in total, 2 GB at most in one rank, CPU 6200 %"),
        ("heartbeat", "of every rank in the last 1.0 s"),
    ]
    assert "slowest" not in dict(formatting.format_summary(snapshot_of(*statuses_with_steps(*[7] * 20))))


def render_lines(*statuses, columns=100, rows=40, encoding="utf-8"):
    lines = render(snapshot_of(*statuses), columns, rows, encoding)
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in lines]


def test_rows_for_a_terminal():
    overall, head, *ranks = render_lines(*statuses_with_steps(25, 50, metrics={"loss": 0.5, "[b]x": 1.0}))
    assert re.fullmatch(r"[━╸╺ ]{20} step 25 of 100 \(25 %\); loss 0.5, \[b\]x 1; 2 ranks running", overall)
    assert head.split("  ")[0] == "rank"
    assert ranks[1].split() == f"1 running 50 of 100 {DASH} loss 0.5, [b]x 1 {DASH} {DASH} {DASH}".split()
    line, *_ = render_lines(status(step=50), encoding="ascii")
    assert (line.isascii(), "step 50" in line) == (True, True)


def test_columns_and_rows_without_room_are_left_out():
    ranks = statuses_with_steps(*range(10), metrics={"a metric of a long name": 0.5})
    assert len(render_lines(*ranks, rows=24)) == 12
    assert all(len(line) <= 60 for line in render_lines(*ranks, columns=60))
    assert "memory" not in render_lines(*ranks, columns=60)[1]
    assert "metrics" not in render_lines(*ranks, columns=40)[-11]
    assert render_lines(*ranks, rows=22)[1].split()[0] == "ranks"
    assert len(render_lines(*ranks, rows=4)) == 1
    assert render_lines(*ranks, rows=3) == render_lines(*ranks, columns=19) == []


def test_an_overall_line_that_is_too_long_is_wrapped_and_has_no_bar():
    seen = status(step=25, metrics={"loss": 0.5, "accuracy": 0.25, "lr": 0.125})
    first, second, *_ = render_lines(seen, columns=60)
    assert f"{first} {second}" == "step 25 of 100 (25 %); loss 0.5, accuracy 0.25, lr 0.125; 1 rank running"


def test_drawing_uses_five_percent_of_the_time_at_most():
    def make_display():
        return SimpleNamespace(period=0.25, show=lambda snapshot: None)

    clock = itertools.count(0.0, 0.2).__next__  # drawing takes from 0.4 to 0.6
    view = LiveView(make_display, lambda show: show([status()]), starts_at_once=True, first_period=0.0, clock=clock)
    view.update()
    assert view.next_update_at == pytest.approx(0.6 + 4.0)
