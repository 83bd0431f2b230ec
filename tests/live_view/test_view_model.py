"""What the live view shows for statuses of ranks. No process."""

import itertools
import math

import pytest

from mpwatch.live_view import formatting
from mpwatch.live_view.line_display import LineDisplay
from mpwatch.live_view.live import LiveView
from mpwatch.live_view.model import SnapshotBuilder, summarize_ranks
from mpwatch.live_view.notebook import NotebookDisplay, render_html
from mpwatch.results.model import WorkerState
from mpwatch.results.rank_status import RankReport, RankStatus

MB = 1_000_000


def status(rank=0, step=None, at=0.0, now=None, **more):
    """Return the status at time `now` of a rank that reported this step at time `at`."""
    report = (
        None if step is None else RankReport(at=at, step=step, total=more.pop("total", 100), metrics=more.pop("metrics", {}))
    )
    fields = {"state": WorkerState.HEALTHY, "pid": 100 + rank, "seen_at": at if now is None else now, **more}
    return RankStatus(rank=rank, report=report, **{"local_rank": rank, **fields})


def statuses_with_steps(*steps, **more):
    return [status(rank, step, **more) for rank, step in enumerate(steps)]


# --- rates


def test_a_rate_is_the_mean_of_ten_seconds_by_the_times_of_the_reports():
    tracker = SnapshotBuilder()
    for second in range(31):
        step = 2 * second if second <= 20 else 40 + 8 * (second - 20)
        (row,) = tracker.update([status(step=step, at=float(second), now=second + 0.9)]).rows
    assert row.rate == 8.0


def test_steps_longer_than_ten_seconds_have_a_rate():
    tracker = SnapshotBuilder()
    for second in range(0, 101, 20):
        (row,) = tracker.update([status(step=second // 20, at=float(second))]).rows
    assert row.rate == pytest.approx(1 / 20)


def test_a_rate_falls_when_no_report_comes():
    tracker = SnapshotBuilder()
    tracker.update([status(step=0, at=0.0)])
    rates = [tracker.update([status(step=10, at=5.0, now=5.0 + later)]).rows[0].rate for later in (0, 1, 5, 10, 100)]
    assert rates == [2.0, 2.0, 2.0, 1.0, 0.1]


@pytest.mark.parametrize("again", [{"step": 1, "at": 6.0}, {"step": 12, "at": 6.0, "pid": 7}])
def test_a_rank_that_restarts_its_count_has_no_rate_until_the_next_step(again):
    tracker = SnapshotBuilder()
    for step in range(5):
        tracker.update([status(step=step + 5, at=float(step))])
    assert tracker.update([status(**again)]).rows[0].rate is None
    assert tracker.update([status(**again | {"step": 14, "at": 7.0})]).rows[0].rate == 14 - again["step"]


def test_unknown_values_are_none():
    (row,) = SnapshotBuilder().update([status()]).rows
    assert (row.step, row.total, row.rate, row.memory, row.cpu, row.heartbeat_age, row.fraction_done) == (None,) * 7
    assert formatting.format_row(row) == ("0", "running", "–", "–", "", "–", "–", "–")  # noqa: RUF001  dashes


def test_cpu_memory_and_heartbeat_age():
    tracker = SnapshotBuilder()
    tracker.update([status(now=0.0, cpu_seconds=10.0)])
    seen = status(now=2.0, cpu_seconds=13.0, memory=1500 * MB, heartbeat_at=1.0, state=WorkerState.UNHEALTHY)
    (row,) = tracker.update([seen]).rows
    assert (row.cpu, row.memory, row.heartbeat_age) == (1.5, 1500 * MB, 1.0)
    assert formatting.format_row(row)[1:] == ("late", "–", "–", "", "1.5 GB", "150 %", "1.0 s ago")  # noqa: RUF001
    (row,) = tracker.update([status(now=3.0, state=WorkerState.SUCCEEDED)]).rows
    assert (row.cpu, row.memory, row.heartbeat_age) == (None, 1500 * MB, None)


# --- overall progress


def test_overall_progress_is_that_of_the_slowest_running_rank():
    done = status(3, 5, state=WorkerState.SUCCEEDED)  # early, and no rank waits for it
    overall = SnapshotBuilder().update([*statuses_with_steps(30, 20, 25), done, status(4)]).overall
    assert (overall.step, overall.total, overall.fraction_done) == (20, 100, 0.2)


def test_progress_after_a_restart_is_unknown_until_the_rank_reports():
    tracker = SnapshotBuilder()
    done = status(0, 100, state=WorkerState.SUCCEEDED)
    tracker.update([done, status(1, 60)])
    for state in (WorkerState.INIT, WorkerState.HEALTHY):
        snapshot = tracker.update([done, status(1, pid=7, state=state)])
        assert (snapshot.overall.step, snapshot.overall.fraction_done) == (None, None)
    assert tracker.update([done, status(1, 40, pid=7)]).overall.step == 40
    assert tracker.update([done, status(1, pid=8, state=WorkerState.FAILED)]).overall.step == 100


def test_progress_of_a_node_whose_ranks_get_other_numbers():
    """After a new rendezvous, the processes of a node may have other global ranks."""
    tracker = SnapshotBuilder()
    tracker.update([status(4, 60, local_rank=0), status(5, 60, local_rank=1)])
    again = [status(2, 40, local_rank=0, pid=7), status(3, local_rank=1, pid=8, state=WorkerState.INIT)]
    snapshot = tracker.update(again)
    assert [row.rank for row in snapshot.rows] == [2, 3]
    assert snapshot.overall.step is None
    again[1] = status(3, 30, local_rank=1, pid=8)
    assert tracker.update(again).overall.step == 30


def test_before_the_rendezvous_there_are_no_ranks():
    snapshot = SnapshotBuilder().update([])
    assert formatting.format_overall(snapshot) == "no ranks yet: waiting for the other nodes"
    assert "<th" not in render_html(snapshot)
    assert "no ranks yet" in render_html(snapshot)


def test_ranks_with_different_totals_are_compared_by_fraction_done():
    overall = (
        SnapshotBuilder().update([status(0, 30, total=100), status(1, 20, total=40), status(2, 40, total=None)]).overall
    )
    assert (overall.step, overall.total) == (30, 100)


def test_steps_without_a_total_have_no_fraction():
    overall = SnapshotBuilder().update([status(0, 30, total=None)]).overall
    assert (overall.step, overall.fraction_done, overall.seconds_left) == (30, None, None)


@pytest.mark.parametrize("of", [100, 1000, 7])
def test_percentages_are_rounded_down_without_binary_errors(of):
    """100 * (29 / 100) is 28.999999999999996."""
    for step in range(of + 1):
        (progress, *_) = formatting.format_overall(SnapshotBuilder().update([status(0, step, total=of)])).split(";")
        assert progress == f"step {step} of {of} ({100 * step // of} %)"


def test_100_percent_means_all_steps():
    last = SnapshotBuilder().update([status(0, 10**9 - 1, total=10**9)])
    assert "(99 %)" in formatting.format_overall(last)


@pytest.mark.parametrize("total", [0, -1])
def test_a_total_that_is_not_positive(total):
    overall = SnapshotBuilder().update([status(0, 30, total=total)]).overall
    assert (overall.fraction_done, overall.seconds_left) == (None, None)


def test_overall_metrics_are_means():
    ranks = [status(rank, 1, metrics={"loss": loss, "lr": 0.1}) for rank, loss in enumerate((1.0, 2.0, 6.0))]
    assert SnapshotBuilder().update([*ranks, status(3)]).overall.metrics == {"loss": 3.0, "lr": pytest.approx(0.1)}
    ranks.append(status(4, 1, metrics={"loss": math.nan}))
    assert math.isnan(SnapshotBuilder().update(ranks).overall.metrics["loss"])


def test_the_overall_line():
    tracker = SnapshotBuilder()
    tracker.update(statuses_with_steps(37, 37, 37, 37, at=0.0, total=1000))
    snapshot = tracker.update(statuses_with_steps(120, 119, 121, 120, at=10.0, total=1000, metrics={"loss": 0.3099}))
    assert (
        formatting.format_overall(snapshot)
        == "step 119 of 1000 (11 %), 8.2 steps/s, 1 min 47 s left; loss 0.31; 4 ranks running"
    )
    assert formatting.format_overall(SnapshotBuilder().update([status()])) == "1 rank running"
    states = [WorkerState.INIT, WorkerState.FAILED, WorkerState.STOPPED, WorkerState.STOPPED]
    snapshot = SnapshotBuilder().update([status(rank, state=state) for rank, state in enumerate(states)])
    assert formatting.format_overall(snapshot) == "4 ranks: 1 starting, 2 stopped, 1 failed"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (107, "1 min 47 s"),
        (3600, "1 h"),
        (90_000, "1 d 1 h"),
    ],
)
def test_time_left(seconds, text):
    tracker = SnapshotBuilder()
    tracker.update([status(step=0, at=0.0)])
    snapshot = tracker.update([status(step=1, at=1.0, total=None)])
    object.__setattr__(snapshot.overall, "seconds_left", seconds)
    assert f", {text} left;" in formatting.format_overall(snapshot)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.31, "0.31"),
        (1e-5, "1e-05"),
        (99.96, "100"),
        (999.6, "1,000"),
        (123456.7, "123,457"),
        (3e9, "3e+09"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers(value, text):
    (row,) = SnapshotBuilder().update([status(step=1, metrics={"x": value})]).rows
    assert formatting.format_row(row)[4] == f"x {text}"


def test_names_of_metrics_are_escaped():
    names = {"\x1b[2Jloss\n": 1.0, "[red]": 2.0, "<b>": 3.0, "\ud800": 4.0, "x" * 100: 5.0, "sixth": 6.0, "seventh": 7.0}
    snapshot = SnapshotBuilder().update([status(step=1, metrics=names)])
    text = formatting.format_row(snapshot.rows[0])[4]
    assert text == f"?[2Jloss? 1, [red] 2, <b> 3, \\ud800 4, {'x' * 39}… 5, sixth 6, …"
    assert "&lt;b&gt; 3" in render_html(snapshot)
    assert "<b> 3" not in render_html(snapshot)


def test_every_state_has_a_text():
    assert set(formatting.STATE_TEXTS) == set(WorkerState) - {WorkerState.UNKNOWN}


# --- many ranks


def test_up_to_sixteen_ranks_have_a_row_each():
    assert not formatting.is_summarized(SnapshotBuilder().update(statuses_with_steps(*range(16))))
    assert formatting.is_summarized(SnapshotBuilder().update(statuses_with_steps(*range(17))))


def test_more_ranks_are_summarized():
    tracker = SnapshotBuilder()
    usage = {"memory": 2000 * MB, "heartbeat_at": 9.0}
    tracker.update(statuses_with_steps(*range(64), at=8.0, cpu_seconds=1.0, **usage))
    steps = [100 + rank for rank in range(60)]
    ranks = statuses_with_steps(*steps, at=10.0, cpu_seconds=3.0, **usage)
    ranks += [status(rank, 500, at=10.0, state=WorkerState.SUCCEEDED, **usage) for rank in (60, 61)]
    ranks += [status(62, now=10.0, state=WorkerState.FAILED), status(63, now=10.0, **usage | {"heartbeat_at": 2.0})]
    snapshot = tracker.update(ranks)
    assert formatting.format_summary(snapshot) == [
        ("ranks", "64 ranks: 61 running, 2 returned, 1 failed"),
        ("steps", "minimum 100, median 131, maximum 500"),
        ("slowest", "rank 0 (100 of 100), rank 1 (101 of 100), rank 2 (102 of 100)"),
        ("all ranks", "memory 128 GB in total, 2 GB at most in one rank, CPU 6000 %"),
        ("heartbeat", "of every rank in the last 8.0 s"),
    ]


def test_ranks_with_equal_progress_have_no_slowest():
    assert summarize_ranks(SnapshotBuilder().update(statuses_with_steps(*[7] * 20)).rows).slowest == []
    assert [row.rank for row in summarize_ranks(SnapshotBuilder().update(statuses_with_steps(8, 9, 7, 6)).rows).slowest] == [
        3,
        2,
        0,
    ]


# --- when the view appears


class RecordingDisplay:
    """A display that records what it is given."""

    period = 3.0
    terminal_restore = None

    def __init__(self):
        self.shown, self.closed = [], []

    def show(self, snapshot):
        self.shown.append(formatting.format_overall(snapshot))

    def close(self, snapshot):
        self.closed.append(formatting.format_overall(snapshot))


def ticking(step):
    times = itertools.count(0.0, step)
    return lambda: next(times)


def test_nothing_is_shown_before_a_rank_reports():
    display = RecordingDisplay()
    view = LiveView(lambda: display, starts_at_once=False, clock=ticking(0.01))
    view.show([status()])
    assert (display.shown, view.period) == ([], 1.0)
    view.show([status(step=3)])
    assert (display.shown, view.period) == (["step 3 of 100 (3 %); 1 rank running"], 3.0)
    view.close([status(step=4, state=WorkerState.SUCCEEDED)])
    view.close([])
    assert display.closed == ["step 4 of 100 (4 %); 1 rank returned"]


def test_a_requested_view_is_shown_at_once():
    display = RecordingDisplay()
    view = LiveView(lambda: display, starts_at_once=True, clock=ticking(0.01))
    assert view.period == 0.25
    view.show([status(state=WorkerState.INIT)])
    assert display.shown == ["1 rank starting"]


@pytest.mark.parametrize(("reports", "left"), [({}, []), ({"step": 1}, ["step 1 of 100 (1 %); 1 rank running"])])
def test_a_call_that_ended_before_the_first_status_request(reports, left):
    display = RecordingDisplay()
    LiveView(lambda: display, starts_at_once=True).close([status(**reports)])
    assert (display.shown, display.closed) == ([], left)
    LiveView(lambda: display, starts_at_once=False).close([status(**reports)])
    assert display.closed == left


def test_drawing_uses_five_percent_of_the_time_at_most():
    view = LiveView(RecordingDisplay, starts_at_once=True, clock=ticking(0.2))
    view.show([status()])
    assert view.period == pytest.approx(4.0)


def test_without_a_display_no_more_statuses_are_requested():
    view = LiveView(lambda: None, starts_at_once=True)
    view.show([status()])
    assert view.period == math.inf


# --- lines, and notebooks


def test_lines_are_written_only_after_changes(capsys):
    import sys

    display = LineDisplay(sys.stderr)
    tracker = SnapshotBuilder()
    for step in (1, 1, 2):
        display.show(tracker.update([status(step=step, at=float(step))]))
    display.close(tracker.update([status(step=2, at=2.0, state=WorkerState.SUCCEEDED)]))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "mpwatch: step 1 of 100 (1 %); 1 rank running",
        "mpwatch: step 2 of 100 (2 %), 1 steps/s, 1 min 38 s left; 1 rank running",
        "mpwatch: step 2 of 100 (2 %); 1 rank returned",
    ]


def test_lines_for_metrics_without_steps(capsys):
    import sys

    display = LineDisplay(sys.stderr)
    for loss in (math.nan, math.nan, 0.5):
        report = RankReport(at=0.0, metrics={"loss": float(loss)})
        seen = RankStatus(rank=0, local_rank=0, state=WorkerState.HEALTHY, report=report, seen_at=0.0)
        display.show(SnapshotBuilder().update([seen]))
    expected = ["mpwatch: loss nan; 1 rank running", "mpwatch: loss 0.5; 1 rank running"]
    assert capsys.readouterr().err.splitlines() == expected


def test_a_full_pipe_is_not_waited_for(monkeypatch):
    import os

    from mpwatch.live_view import line_display

    monkeypatch.setattr(line_display, "LAST_LINE_SECONDS", 0.01)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb", buffering=0) as read_end, open(writer, "w") as write_end:
        while True:
            try:
                os.write(writer, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(writer, True)
        display, tracker = LineDisplay(write_end), SnapshotBuilder()
        display.show(tracker.update([status(step=1)]))
        display.close(tracker.update([status(step=2)]))
        read_end.read(1 << 20)
        display.show(tracker.update([status(step=2)]))
        assert read_end.read(1 << 20) == b"mpwatch: step 2 of 100 (2 %); 1 rank running\n"


def test_a_table_for_a_notebook():
    html = render_html(SnapshotBuilder().update(statuses_with_steps(25, 50)))
    assert '<progress value="0.2500" max="1"></progress> <b>step 25 of 100 (25 %); 2 ranks running</b>' in html
    assert html.count("<tr>") == 3
    folded = render_html(SnapshotBuilder().update(statuses_with_steps(*range(20))))
    assert "maximum 19" in folded
    assert "heartbeat" not in folded


def test_a_notebook_table_is_updated_in_place(monkeypatch):
    import sys
    import types

    shown = []

    class Handle:
        def update(self, bundle, *, raw):
            assert raw
            shown.append(("again", bundle["text/plain"]))

    def display(bundle, *, raw, display_id):
        assert (raw, display_id) == (True, True)
        shown.append(("first", bundle["text/plain"]))
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    notebook = NotebookDisplay()
    notebook.show(SnapshotBuilder().update([status()]))
    notebook.close(SnapshotBuilder().update([status(state=WorkerState.SUCCEEDED)]))
    assert shown == [("first", "1 rank running"), ("again", "1 rank returned")]
