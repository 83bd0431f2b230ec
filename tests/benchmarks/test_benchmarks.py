"""The benchmark programs run, and their figures are computed and shown correctly. This module measures no performance."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest

from support.programs import ENV, python

BENCHMARKS = Path(__file__).parent


@pytest.fixture
def verdicts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import verdicts

    yield verdicts
    for name in ("verdicts", "measures"):
        del sys.modules[name]


@pytest.fixture
def tee(monkeypatch):
    """Take the measure `tee` with a launcher that replaces the real one of that name: 1,000 lines for each of two ranks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import teed
    from measures import MEASURES

    def take(name, launcher, folder):
        folder.mkdir(exist_ok=True)
        monkeypatch.setitem(teed.LAUNCH, name, launcher)
        return teed.tee(dataclasses.replace(MEASURES["tee"], lines=1000), name, 2, str(folder))

    yield take
    for name in ("teed", "reader", "launchers", "tasks", "measures"):
        del sys.modules[name]


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks run on Linux only")
def test_bench_writes_figures_and_prints_a_table(tmp_path):
    path = tmp_path / "results.json"
    done = python(str(BENCHMARKS / "bench.py"), "start", "-l", "mpwatch,floor", "-r", "1", "-o", str(path))
    results = json.loads(path.read_text())
    ours, floor = results["rows"]
    assert (ours["launcher"], ours["taken"], ours["errors"], ours["left"]) == ("mpwatch", 1, [], [])
    assert floor["ratio"] == ours["median"] / floor["median"]
    assert results["figures"]["start"][0]["floor"]["8"]["entered"] == floor["median"]
    assert f"{floor['ratio']:.3g} of it, goal 1.3" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks run on Linux only")
def test_a_restart_is_timed(tmp_path):
    path = tmp_path / "results.json"
    python(str(BENCHMARKS / "bench.py"), "restart", "-l", "mpwatch", "-r", "1", "-o", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert [(row["figure"], row["taken"], row["left"]) for row in rows] == [
        (figure, 1, []) for figure in ("entered", "restarted", "restart_ratio")
    ]
    entered, restarted, ratio = (row["median"] for row in rows)
    assert ratio == restarted / entered


def test_the_output_of_ranks_is_timed(tmp_path):
    tee_once = (
        "import dataclasses, json, measures, sys, teed\n"
        "measure = dataclasses.replace(measures.MEASURES['tee'], lines=2000)\n"
        "print(json.dumps(teed.tee(measure, 'mpwatch', 2, sys.argv[1])))"
    )
    path = os.pathsep.join([str(BENCHMARKS), ENV["PYTHONPATH"]])
    figures = json.loads(python("-c", tee_once, str(tmp_path), env={**ENV, "PYTHONPATH": path}).stdout)
    assert (figures.keys(), figures["wrong_lines"]) == ({"shown", "wrong_lines", "peak"}, 0)


def make_printing_launcher(show, write=None):
    """Make a launcher without processes. `show` changes the shown lines of its two ranks, `write` the lines of a log file."""

    def launch(_task, ranks, args):
        (folder, lines), printed = args, [make_lines(rank) for rank in range(ranks)]
        assert lines == len(printed[0])
        for rank, rank_lines in enumerate(printed):
            (log := Path(folder, "logs", "run", "attempt_0", str(rank))).mkdir(parents=True)
            (log / "stdout.log").write_text("".join(write(rank_lines) if write else rank_lines))
        both = [f"[{rank}] {line}" for rank, rank_lines in enumerate(printed) for line in rank_lines]
        os.write(1, "".join(show(both)).encode())

    return lambda logs: launch


def make_lines(rank):
    return [f"{rank} {number} ".ljust(99, "x") + "\n" for number in range(1000)]


@pytest.mark.parametrize(
    ("show", "wrong_lines"),
    [
        (lambda lines: lines, 0),
        (lambda lines: [line for pair in zip(lines[:1000], lines[1000:], strict=True) for line in pair], 0),  # alternately
        (lambda lines: lines[:-1], 1),  # the last one is lost
        (lambda lines: [*lines, lines[-1]], 2),  # shown twice: it is not the next line, and there is one too many
        (lambda lines: [*lines[:5], lines[6], lines[5], *lines[7:]], 3),  # three lines are not the next one
        (lambda lines: [lines[0][:50], lines[1000], lines[0][50:], *lines[1:1000], *lines[1001:]], 4),  # torn
        (lambda lines: [lines[0][4:], *lines[1:]], 2),  # without its prefix; then the line after it is not the next one
    ],
)
def test_lines_that_are_shown_wrongly_are_counted(tee, tmp_path, show, wrong_lines):
    assert tee("elastic", make_printing_launcher(show), tmp_path)["wrong_lines"] == wrong_lines
    if wrong_lines:
        with pytest.raises(AssertionError, match=f"{wrong_lines} lines are not shown"):
            tee("mpwatch", make_printing_launcher(show), tmp_path / "second")


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (lambda lines: lines[:-1], "stdout.log has 99900 bytes"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "not what was printed, somewhere from line 0 on"),
    ],
)
def test_a_log_file_that_differs_from_the_output_is_an_error(tee, tmp_path, write, error):
    with pytest.raises(AssertionError, match=error):
        tee("elastic", make_printing_launcher(lambda lines: lines, write), tmp_path)


def test_the_reader_exits_when_a_launcher_fails(tee, tmp_path):
    descriptors = []

    def fail(*_):
        descriptors.append(os.dup(1))  # as processes that outlive the call do
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        tee("mpwatch", lambda logs: fail, tmp_path)
    os.close(*descriptors)


def test_the_table_shows_missed_goals_and_failures(verdicts):
    seconds = {"mpwatch": (0.2, 0.3, 0.2), "floor": (0.1, 0.2, 0.1), "mp_spawn": (4, 4, 4)}
    rounds = [{name: {8: {"entered": samples[number]}} for name, samples in seconds.items()} for number in range(3)]
    for figures in rounds:
        figures["elastic"] = {8: {"error": "no end within 120 s", "left": ["7: python"]}}
    rows = {row.launcher: row for row in verdicts.make_rows("start", rounds)}
    assert (rows["mpwatch"].median, rows["mpwatch"].least, rows["mpwatch"].most) == (0.2, 0.2, 0.3)
    assert (rows["floor"].ratio, rows["floor"].reached) == (2, False)
    assert rows["mp_spawn"].reached is True
    assert (rows["elastic"].median, len(rows["elastic"].errors), len(rows["elastic"].left)) == (None, 3, 3)
    text = "\n".join(verdicts.format_table("start", rounds, rows.values()) + verdicts.format_summary(rows.values()))
    assert "2 of it, goal 1.3: MISSED" in text
    assert "elastic failed 3 times: no end within 120 s" in text
    assert "elastic left 3 processes" in text
    assert "goals: 1 of 2 reached" in text


def test_a_figure_at_its_cap_is_shown_as_more_than_the_cap(verdicts):
    rounds = [{"mpwatch": {4: {"restarted": 3.0}}, "elastic": {4: {"restarted": seconds}}} for seconds in (60.0, 60.0, 9.0)]
    text = "\n".join(verdicts.format_table("nodes_loss", rounds, verdicts.make_rows("nodes_loss", rounds)))
    assert re.search(r"mpwatch +3\.00 s +3\.00 s +3\.00 s$", text, re.MULTILINE)
    assert re.search(r"elastic +>60\.0 s +9\.00 s +>60\.0 s   <0\.05 of it", text)


def test_a_slope_is_the_time_of_the_call_by_the_number_of_ranks(verdicts):
    cost = {ranks: {"total": 0.5 + 0.01 * ranks} for ranks in (2, 4, 8)}
    broken = {**cost, 8: {"error": "too many open files"}}
    ours, floor = verdicts.make_rows("scaling", [{"mpwatch": cost, "floor": cost}, {"mpwatch": cost, "floor": broken}])
    assert ours.median == pytest.approx(0.01)
    assert (ours.taken, floor.taken, floor.errors) == (2, 1, ("too many open files",))


def test_a_restart_is_compared_with_the_first_start_of_the_same_program(verdicts):
    def round_of(**seconds):
        return {name: {8: {"entered": a, "restarted": b, "restart_ratio": b / a}} for name, (a, b) in seconds.items()}

    rounds = [round_of(mpwatch=(0.2, 0.25), elastic=(4.0, 5.0)), round_of(mpwatch=(0.1, 0.2), elastic=(4.0, 5.0))]
    rows = {(row.figure, row.launcher): row for row in verdicts.make_rows("restart", rounds)}
    first, restarted, ours = (rows[figure, "mpwatch"] for figure in ("entered", "restarted", "restart_ratio"))
    assert (first.goal, restarted.goal) == (None, None)
    assert (ours.median, ours.goal, ours.reached) == (1.625, 1.5, False)
    assert rows["restarted", "elastic"].ratio == pytest.approx(0.045)
    assert rows["restarted", "elastic"].reached is True
    assert rows["restart_ratio", "elastic"].ratio is None
    text = "\n".join(verdicts.format_table("restart", rounds, rows.values()) + verdicts.format_summary(rows.values()))
    assert re.search(r"1\.62 x +1\.25 x +2 x +goal 1\.5: MISSED", text)
    assert "missed: restart, restart_ratio is 1.62, not 1.5" in text
