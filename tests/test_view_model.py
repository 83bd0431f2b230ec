"""What the live view shows, from how the ranks fared at one look after another."""

import itertools
import math

import pytest

from mpwatch.live_view import formatting
from mpwatch.live_view.line_display import LineDisplay
from mpwatch.live_view.live import LiveView
from mpwatch.live_view.model import Tracker, spread_of
from mpwatch.live_view.notebook import NotebookDisplay, html_of
from mpwatch.results.model import WorkerState
from mpwatch.results.rank_status import RankStatus, Report

MB = 1_000_000


def status(rank=0, step=None, at=0.0, now=None, **more):
    """At time `now`, of a rank that has reported that step at `at`."""
    report = (
        None if step is None else Report(at=at, step=step, total=more.pop("total", 100), metrics=more.pop("metrics", {}))
    )
    fields = {"state": WorkerState.HEALTHY, "pid": 100 + rank, "seen_at": at if now is None else now, **more}
    return RankStatus(rank=rank, report=report, **{"local_rank": rank, **fields})


def steps_of(*steps, **more):
    return [status(rank, step, **more) for rank, step in enumerate(steps)]


# --- rates


def test_a_rate_is_the_mean_of_ten_seconds_by_the_stamps_of_the_rank():
    tracker = Tracker()
    for second in range(31):
        step = 2 * second if second <= 20 else 40 + 8 * (second - 20)
        (line,) = tracker.see([status(step=step, at=float(second), now=second + 0.9)]).lines
    assert line.rate == 8.0


def test_steps_that_are_longer_than_that_have_a_rate_too():
    tracker = Tracker()
    for second in range(0, 101, 20):
        (line,) = tracker.see([status(step=second // 20, at=float(second))]).lines
    assert line.rate == pytest.approx(1 / 20)


def test_a_rate_falls_when_nothing_comes_any_more():
    tracker = Tracker()
    tracker.see([status(step=0, at=0.0)])
    rates = [tracker.see([status(step=10, at=5.0, now=5.0 + later)]).lines[0].rate for later in (0, 1, 5, 10, 100)]
    assert rates == [2.0, 2.0, 2.0, 1.0, 0.1]


@pytest.mark.parametrize("again", [{"step": 1, "at": 6.0}, {"step": 12, "at": 6.0, "pid": 7}])
def test_who_begins_anew_has_no_rate_until_it_goes_on(again):
    tracker = Tracker()
    for step in range(5):
        tracker.see([status(step=step + 5, at=float(step))])
    assert tracker.see([status(**again)]).lines[0].rate is None
    assert tracker.see([status(**again | {"step": 14, "at": 7.0})]).lines[0].rate == 14 - again["step"]


def test_what_is_not_known_is_none():
    (line,) = Tracker().see([status()]).lines
    assert (line.step, line.total, line.rate, line.memory, line.cpu, line.silence, line.done) == (None,) * 7
    assert formatting.cells(line) == ("0", "at work", "–", "–", "", "–", "–", "–")  # noqa: RUF001  dashes


def test_cpu_memory_and_silence():
    tracker = Tracker()
    tracker.see([status(now=0.0, cpu_seconds=10.0)])
    seen = status(now=2.0, cpu_seconds=13.0, memory=1500 * MB, heartbeat_at=1.0, state=WorkerState.UNHEALTHY)
    (line,) = tracker.see([seen]).lines
    assert (line.cpu, line.memory, line.silence) == (1.5, 1500 * MB, 1.0)
    assert formatting.cells(line)[1:] == ("late", "–", "–", "", "1.5 GB", "150 %", "1.0 s ago")  # noqa: RUF001
    (line,) = tracker.see([status(now=3.0, state=WorkerState.SUCCEEDED)]).lines
    assert (line.cpu, line.memory, line.silence) == (None, 1500 * MB, None)


# --- all together


def test_all_have_come_as_far_as_the_hindmost_at_work():
    done = status(3, 5, state=WorkerState.SUCCEEDED)  # early: nobody waits for it
    overall = Tracker().see([*steps_of(30, 20, 25), done, status(4)]).overall
    assert (overall.step, overall.total, overall.done) == (20, 100, 0.2)


def test_a_rank_that_is_started_again_has_come_as_far_as_it_says_then():
    tracker = Tracker()
    done = status(0, 100, state=WorkerState.SUCCEEDED)
    tracker.see([done, status(1, 60)])
    for state in (WorkerState.INIT, WorkerState.HEALTHY):
        picture = tracker.see([done, status(1, pid=7, state=state)])
        assert (picture.overall.step, picture.overall.done) == (None, None)
    assert tracker.see([done, status(1, 40, pid=7)]).overall.step == 40
    assert tracker.see([done, status(1, pid=8, state=WorkerState.FAILED)]).overall.step == 100


def test_ranks_that_were_numbered_anew_go_on_where_they_say():
    """A node of several has other ranks when the others have met anew."""
    tracker = Tracker()
    tracker.see([status(4, 60, local_rank=0), status(5, 60, local_rank=1)])
    again = [status(2, 40, local_rank=0, pid=7), status(3, local_rank=1, pid=8, state=WorkerState.INIT)]
    picture = tracker.see(again)
    assert [line.rank for line in picture.lines] == [2, 3]
    assert picture.overall.step is None
    again[1] = status(3, 30, local_rank=1, pid=8)
    assert tracker.see(again).overall.step == 30


def test_as_long_as_nodes_have_yet_to_meet_there_are_no_ranks():
    picture = Tracker().see([])
    assert formatting.line_of(picture) == "no ranks yet: waiting for the other nodes"
    assert "<th" not in html_of(picture)
    assert "no ranks yet" in html_of(picture)


def test_shares_of_different_sizes_are_compared_by_how_much_of_them_is_done():
    overall = Tracker().see([status(0, 30, total=100), status(1, 20, total=40), status(2, 40, total=None)]).overall
    assert (overall.step, overall.total) == (30, 100)


def test_steps_without_a_total_have_no_bar():
    overall = Tracker().see([status(0, 30, total=None)]).overall
    assert (overall.step, overall.done, overall.seconds_left) == (30, None, None)


@pytest.mark.parametrize("of", [100, 1000, 7])
def test_a_hundredth_is_full_when_it_is_done(of):
    """100 * (29 / 100) is 28.999999999999996."""
    for step in range(of + 1):
        (progress, *_) = formatting.line_of(Tracker().see([status(0, step, total=of)])).split(";")
        assert progress == f"step {step} of {of} ({100 * step // of} %)"


def test_it_is_not_all_done_before_it_is():
    last = Tracker().see([status(0, 10**9 - 1, total=10**9)])
    assert "(99 %)" in formatting.line_of(last)


@pytest.mark.parametrize("total", [0, -1])
def test_a_total_that_is_none(total):
    overall = Tracker().see([status(0, 30, total=total)]).overall
    assert (overall.done, overall.seconds_left) == (None, None)


def test_metrics_are_means():
    ranks = [status(rank, 1, metrics={"loss": loss, "lr": 0.1}) for rank, loss in enumerate((1.0, 2.0, 6.0))]
    assert Tracker().see([*ranks, status(3)]).overall.metrics == {"loss": 3.0, "lr": pytest.approx(0.1)}
    ranks.append(status(4, 1, metrics={"loss": math.nan}))
    assert math.isnan(Tracker().see(ranks).overall.metrics["loss"])


def test_the_line_that_sums_it_up():
    tracker = Tracker()
    tracker.see(steps_of(37, 37, 37, 37, at=0.0, total=1000))
    picture = tracker.see(steps_of(120, 119, 121, 120, at=10.0, total=1000, metrics={"loss": 0.3099}))
    assert formatting.line_of(picture) == "step 119 of 1000 (11 %), 8.2 steps/s, 1 min 47 s left; loss 0.31; 4 ranks at work"
    assert formatting.line_of(Tracker().see([status()])) == "1 rank at work"
    states = [WorkerState.INIT, WorkerState.FAILED, WorkerState.STOPPED, WorkerState.STOPPED]
    picture = Tracker().see([status(rank, state=state) for rank, state in enumerate(states)])
    assert formatting.line_of(picture) == "4 ranks: 1 starting, 2 stopped, 1 failed"


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
def test_how_long_it_takes(seconds, text):
    tracker = Tracker()
    tracker.see([status(step=0, at=0.0)])
    picture = tracker.see([status(step=1, at=1.0, total=None)])
    object.__setattr__(picture.overall, "seconds_left", seconds)
    assert f", {text} left;" in formatting.line_of(picture)


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
    (line,) = Tracker().see([status(step=1, metrics={"x": value})]).lines
    assert formatting.cells(line)[4] == f"x {text}"


def test_names_of_metrics_do_nothing_to_a_terminal_or_a_page():
    names = {"\x1b[2Jloss\n": 1.0, "[red]": 2.0, "<b>": 3.0, "\ud800": 4.0, "x" * 100: 5.0, "sixth": 6.0, "seventh": 7.0}
    picture = Tracker().see([status(step=1, metrics=names)])
    text = formatting.cells(picture.lines[0])[4]
    assert text == f"?[2Jloss? 1, [red] 2, <b> 3, \\ud800 4, {'x' * 39}… 5, sixth 6, …"
    assert "&lt;b&gt; 3" in html_of(picture)
    assert "<b> 3" not in html_of(picture)


def test_the_words_are_those_of_all_states():
    assert set(formatting.STATES) == set(WorkerState) - {WorkerState.UNKNOWN}


# --- many ranks


def test_up_to_sixteen_ranks_have_a_line_each():
    assert not formatting.is_folded(Tracker().see(steps_of(*range(16))))
    assert formatting.is_folded(Tracker().see(steps_of(*range(17))))


def test_more_are_folded():
    tracker = Tracker()
    usage = {"memory": 2000 * MB, "heartbeat_at": 9.0}
    tracker.see(steps_of(*range(64), at=8.0, cpu_seconds=1.0, **usage))
    steps = [100 + rank for rank in range(60)]
    ranks = steps_of(*steps, at=10.0, cpu_seconds=3.0, **usage)
    ranks += [status(rank, 500, at=10.0, state=WorkerState.SUCCEEDED, **usage) for rank in (60, 61)]
    ranks += [status(62, now=10.0, state=WorkerState.FAILED), status(63, now=10.0, **usage | {"heartbeat_at": 2.0})]
    picture = tracker.see(ranks)
    assert formatting.summary(picture) == [
        ("ranks", "64 ranks: 61 at work, 2 returned, 1 failed"),
        ("steps", "100 at least, 131 in the middle, 500 at most"),
        ("slowest", "rank 0 (100 of 100), rank 1 (101 of 100), rank 2 (102 of 100)"),
        ("machine", "memory 128 GB together, 2 GB at most, CPU 6000 %"),
        ("heard of", "all of them in the last 8.0 s"),
    ]


def test_ranks_in_step_have_no_slowest():
    assert spread_of(Tracker().see(steps_of(*[7] * 20)).lines).slowest == []
    assert [line.rank for line in spread_of(Tracker().see(steps_of(8, 9, 7, 6)).lines).slowest] == [3, 2, 0]


# --- when it is shown


class Board:
    """A display that remembers."""

    period = 3.0
    repair = None

    def __init__(self):
        self.shown, self.left = [], []

    def show(self, picture):
        self.shown.append(formatting.line_of(picture))

    def leave(self, picture):
        self.left.append(formatting.line_of(picture))


def ticking(step):
    times = itertools.count(0.0, step)
    return lambda: next(times)


def test_nothing_is_shown_before_a_rank_reports():
    board = Board()
    view = LiveView(lambda: board, is_eager=False, clock=ticking(0.01))
    view.show([status()])
    assert (board.shown, view.period) == ([], 1.0)
    view.show([status(step=3)])
    assert (board.shown, view.period) == (["step 3 of 100 (3 %); 1 rank at work"], 3.0)
    view.close([status(step=4, state=WorkerState.SUCCEEDED)])
    view.close([])
    assert board.left == ["step 4 of 100 (4 %); 1 rank returned"]


def test_unless_it_is_asked_for():
    board = Board()
    view = LiveView(lambda: board, is_eager=True, clock=ticking(0.01))
    assert view.period == 0.25
    view.show([status(state=WorkerState.INIT)])
    assert board.shown == ["1 rank starting"]


@pytest.mark.parametrize(("reports", "left"), [({}, []), ({"step": 1}, ["step 1 of 100 (1 %); 1 rank at work"])])
def test_what_was_over_before_it_was_looked_at(reports, left):
    board = Board()
    LiveView(lambda: board, is_eager=True).close([status(**reports)])
    assert (board.shown, board.left) == ([], left)
    LiveView(lambda: board, is_eager=False).close([status(**reports)])
    assert board.left == left


def test_drawing_takes_a_twentieth_of_the_time_at_most():
    view = LiveView(Board, is_eager=True, clock=ticking(0.2))
    view.show([status()])
    assert view.period == pytest.approx(4.0)


def test_where_there_is_no_place_nobody_asks_any_more():
    view = LiveView(lambda: None, is_eager=True)
    view.show([status()])
    assert view.period == math.inf


# --- plain lines, and notebooks


def test_plain_lines_say_what_is_new(capsys):
    import sys

    display = LineDisplay(sys.stderr)
    tracker = Tracker()
    for step in (1, 1, 2):
        display.show(tracker.see([status(step=step, at=float(step))]))
    display.leave(tracker.see([status(step=2, at=2.0, state=WorkerState.SUCCEEDED)]))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "mpwatch: step 1 of 100 (1 %); 1 rank at work",
        "mpwatch: step 2 of 100 (2 %), 1 steps/s, 1 min 38 s left; 1 rank at work",
        "mpwatch: step 2 of 100 (2 %); 1 rank returned",
    ]


def test_plain_lines_tell_of_metrics_without_steps(capsys):
    import sys

    display = LineDisplay(sys.stderr)
    for loss in (math.nan, math.nan, 0.5):
        report = Report(at=0.0, metrics={"loss": float(loss)})
        seen = RankStatus(rank=0, local_rank=0, state=WorkerState.HEALTHY, report=report, seen_at=0.0)
        display.show(Tracker().see([seen]))
    told = ["mpwatch: loss nan; 1 rank at work", "mpwatch: loss 0.5; 1 rank at work"]
    assert capsys.readouterr().err.splitlines() == told


def test_a_pipe_that_nobody_reads_is_not_waited_for(monkeypatch):
    import os

    from mpwatch.live_view import line_display

    monkeypatch.setattr(line_display, "LAST_SECONDS", 0.01)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb", buffering=0) as ours, open(writer, "w") as theirs:
        while True:
            try:
                os.write(writer, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(writer, True)
        display, tracker = LineDisplay(theirs), Tracker()
        display.show(tracker.see([status(step=1)]))
        display.leave(tracker.see([status(step=2)]))
        ours.read(1 << 20)
        display.show(tracker.see([status(step=2)]))
        assert ours.read(1 << 20) == b"mpwatch: step 2 of 100 (2 %); 1 rank at work\n"


def test_a_table_for_a_notebook():
    html = html_of(Tracker().see(steps_of(25, 50)))
    assert '<progress value="0.2500" max="1"></progress> <b>step 25 of 100 (25 %); 2 ranks at work</b>' in html
    assert html.count("<tr>") == 3
    folded = html_of(Tracker().see(steps_of(*range(20))))
    assert "19 at most" in folded
    assert "heard of" not in folded


def test_a_notebook_is_brought_up_to_date_in_place(monkeypatch):
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
    notebook.show(Tracker().see([status()]))
    notebook.leave(Tracker().see([status(state=WorkerState.SUCCEEDED)]))
    assert shown == [("first", "1 rank at work"), ("again", "1 rank returned")]
