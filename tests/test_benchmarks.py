"""The benchmarks are not taken here; but they can be, and what is said of the figures is right."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest
from programs import ENV, python

BENCHMARKS = Path(__file__).parent / "benchmarks"


@pytest.fixture
def verdicts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import verdicts

    yield verdicts
    for name in ("verdicts", "measures"):
        del sys.modules[name]


@pytest.fixture
def tee(monkeypatch):
    """Takes the measure of that name with a launcher that is put in the place of a real one: 1,000 lines for each of two ranks."""
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


@pytest.mark.skipif(sys.platform != "linux", reason="benchmarks are taken on Linux")
def test_benchmarks_can_be_taken(tmp_path):
    kept = tmp_path / "kept.json"
    done = python(str(BENCHMARKS / "bench.py"), "start", "-l", "mpwatch,floor", "-r", "1", "-o", str(kept))
    told = json.loads(kept.read_text())
    ours, floor = told["rows"]
    assert (ours["launcher"], ours["taken"], ours["errors"], ours["left"]) == ("mpwatch", 1, [], [])
    assert floor["ratio"] == ours["median"] / floor["median"]
    assert told["figures"]["start"][0]["floor"]["8"]["entered"] == floor["median"]
    assert f"{floor['ratio']:.3g} of it, goal 1.3" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="benchmarks are taken on Linux")
def test_a_restart_can_be_timed(tmp_path):
    kept = tmp_path / "kept.json"
    python(str(BENCHMARKS / "bench.py"), "restart", "-l", "mpwatch", "-r", "1", "-o", str(kept))
    rows = json.loads(kept.read_text())["rows"]
    assert [(row["figure"], row["taken"], row["left"]) for row in rows] == [
        (figure, 1, []) for figure in ("entered", "again", "again_by_entered")
    ]
    entered, again, ratio = (row["median"] for row in rows)
    assert ratio == again / entered


def test_what_ranks_print_is_timed(tmp_path):
    tee_once = (
        "import dataclasses, json, measures, sys, teed\n"
        "measure = dataclasses.replace(measures.MEASURES['tee'], lines=2000)\n"
        "print(json.dumps(teed.tee(measure, 'mpwatch', 2, sys.argv[1])))"
    )
    path = os.pathsep.join([str(BENCHMARKS), ENV["PYTHONPATH"]])
    figures = json.loads(python("-c", tee_once, str(tmp_path), env={**ENV, "PYTHONPATH": path}).stdout)
    assert (figures.keys(), figures["faults"]) == ({"shown", "faults", "peak"}, 0)


def print_as(shown, kept=None):
    """A launcher without processes: what its two ranks have printed is shown so, and kept so if that is something else."""

    def launch(_task, ranks, args):
        (folder, lines), printed = args, [printed_by(rank) for rank in range(ranks)]
        assert lines == len(printed[0])
        for rank, its in enumerate(printed):
            (log := Path(folder, "logs", "run", "attempt_0", str(rank))).mkdir(parents=True)
            (log / "stdout.log").write_text("".join(kept(its) if kept else its))
        both = [f"[{rank}] {line}" for rank, its in enumerate(printed) for line in its]
        os.write(1, "".join(shown(both)).encode())

    return lambda logs: launch


def printed_by(rank):
    return [f"{rank} {number} ".ljust(99, "x") + "\n" for number in range(1000)]


@pytest.mark.parametrize(
    ("shown", "faults"),
    [
        (lambda lines: lines, 0),
        (lambda lines: [line for pair in zip(lines[:1000], lines[1000:], strict=True) for line in pair], 0),  # taking turns
        (lambda lines: lines[:-1], 1),  # the last one is lost
        (lambda lines: [*lines, lines[-1]], 2),  # shown twice: not the next one, and one too many
        (lambda lines: [*lines[:5], lines[6], lines[5], *lines[7:]], 3),  # not the next one, three times over
        (lambda lines: [lines[0][:50], lines[1000], lines[0][50:], *lines[1:1000], *lines[1001:]], 4),  # torn
        (lambda lines: [lines[0][4:], *lines[1:]], 2),  # without its prefix; so the next one is not the next
    ],
)
def test_lines_that_are_not_shown_as_they_were_printed_are_counted(tee, tmp_path, shown, faults):
    assert tee("elastic", print_as(shown), tmp_path)["faults"] == faults
    if faults:
        with pytest.raises(AssertionError, match=f"{faults} lines are not shown"):
            tee("mpwatch", print_as(shown), tmp_path / "again")


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        (lambda lines: lines[:-1], "stdout.log has 99900 bytes"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "not what was printed, somewhere from line 0 on"),
    ],
)
def test_files_must_hold_what_was_printed(tee, tmp_path, kept, why):
    with pytest.raises(AssertionError, match=why):
        tee("elastic", print_as(lambda lines: lines, kept), tmp_path)


def test_a_launcher_that_fails_does_not_leave_the_reader_waiting(tee, tmp_path):
    held = []

    def fail(*_):
        held.append(os.dup(1))  # as processes do that outlive the call
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        tee("mpwatch", lambda logs: fail, tmp_path)
    os.close(*held)


def test_figures_are_judged_and_failures_are_told(verdicts):
    seconds = {"mpwatch": (0.2, 0.3, 0.2), "floor": (0.1, 0.2, 0.1), "mp_spawn": (4, 4, 4)}
    rounds = [{name: {8: {"entered": figures[number]}} for name, figures in seconds.items()} for number in range(3)]
    for one in rounds:
        one["elastic"] = {8: {"error": "no end within 120 s", "left": ["7: python"]}}
    rows = {row.launcher: row for row in verdicts.rows_of("start", rounds)}
    assert (rows["mpwatch"].median, rows["mpwatch"].least, rows["mpwatch"].most) == (0.2, 0.2, 0.3)
    assert (rows["floor"].ratio, rows["floor"].reached) == (2, False)
    assert rows["mp_spawn"].reached is True
    assert (rows["elastic"].median, len(rows["elastic"].errors), len(rows["elastic"].left)) == (None, 3, 3)
    text = "\n".join(verdicts.table("start", rounds, rows.values()) + verdicts.summary(rows.values()))
    assert "2 of it, goal 1.3: MISSED" in text
    assert "elastic failed 3 times: no end within 120 s" in text
    assert "elastic left 3 processes" in text
    assert "goals: 1 of 2 reached" in text


def test_what_has_taken_longer_than_was_waited_for_it_is_said_to_be_more(verdicts):
    rounds = [{"mpwatch": {4: {"again": 3.0}}, "elastic": {4: {"again": seconds}}} for seconds in (60.0, 60.0, 9.0)]
    text = "\n".join(verdicts.table("nodes_loss", rounds, verdicts.rows_of("nodes_loss", rounds)))
    assert re.search(r"mpwatch +3\.00 s +3\.00 s +3\.00 s$", text, re.MULTILINE)
    assert re.search(r"elastic +>60\.0 s +9\.00 s +>60\.0 s   <0\.05 of it", text)


def test_a_slope_is_of_the_whole_call_over_the_ranks(verdicts):
    cost = {ranks: {"whole": 0.5 + 0.01 * ranks} for ranks in (2, 4, 8)}
    broken = {**cost, 8: {"error": "too many open files"}}
    ours, floor = verdicts.rows_of("scaling", [{"mpwatch": cost, "floor": cost}, {"mpwatch": cost, "floor": broken}])
    assert ours.median == pytest.approx(0.01)
    assert (ours.taken, floor.taken, floor.errors) == (2, 1, ("too many open files",))


def test_a_restart_is_compared_with_the_first_start_of_the_same_program(verdicts):
    def round_of(**seconds):
        return {name: {8: {"entered": a, "again": b, "again_by_entered": b / a}} for name, (a, b) in seconds.items()}

    rounds = [round_of(mpwatch=(0.2, 0.25), elastic=(4.0, 5.0)), round_of(mpwatch=(0.1, 0.2), elastic=(4.0, 5.0))]
    rows = {(row.figure, row.launcher): row for row in verdicts.rows_of("restart", rounds)}
    first, again, ours = (rows[figure, "mpwatch"] for figure in ("entered", "again", "again_by_entered"))
    assert (first.goal, again.goal) == (None, None)
    assert (ours.median, ours.goal, ours.reached) == (1.625, 1.5, False)
    assert rows["again", "elastic"].ratio == pytest.approx(0.045)
    assert rows["again", "elastic"].reached is True
    assert rows["again_by_entered", "elastic"].ratio is None
    text = "\n".join(verdicts.table("restart", rounds, rows.values()) + verdicts.summary(rows.values()))
    assert re.search(r"1\.62 x +1\.25 x +2 x +goal 1\.5: MISSED", text)
    assert "missed: restart, again_by_entered is 1.62, not 1.5" in text
