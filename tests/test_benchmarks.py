"""The benchmarks are not taken here; but they can be, and what is said of the figures is right."""

import json
import sys
from pathlib import Path

import pytest
from programs import python

BENCHMARKS = Path(__file__).parent / "benchmarks"


@pytest.fixture
def verdicts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import verdicts

    yield verdicts
    for name in ("verdicts", "measures"):
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


def test_a_slope_is_of_the_whole_call_over_the_ranks(verdicts):
    cost = {ranks: {"whole": 0.5 + 0.01 * ranks} for ranks in (2, 4, 8)}
    broken = {**cost, 8: {"error": "too many open files"}}
    ours, floor = verdicts.rows_of("scaling", [{"mpwatch": cost, "floor": cost}, {"mpwatch": cost, "floor": broken}])
    assert ours.median == pytest.approx(0.01)
    assert (ours.taken, floor.taken, floor.errors) == (2, 1, ("too many open files",))
