"""The benchmark programs run, and the page shows the published figures. Nothing here measures."""

import json
import sys
from pathlib import Path

import pytest

from support.programs import python

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("measures", "figures"),
    [
        (["start"], ["entered"]),
        pytest.param(["restart"], ["entered", "restarted", "restart_ratio"], marks=pytest.mark.slow),
        pytest.param(["nodes_start", "nodes_failure"], ["entered", "stopped"], marks=pytest.mark.slow),
    ],
)
def test_bench_writes_figures_and_prints_a_table(tmp_path, measures, figures):
    path = tmp_path / "results.json"
    done = python(str(BENCHMARKS / "bench.py"), *measures, "-l", "mpwatch", "-r", "1", "-o", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert [(row["figure"], row["taken"], row["errors"], row["left"]) for row in rows] == [
        (figure, 1, [], []) for figure in figures
    ]
    assert all(0 < row["median"] < 60 for row in rows)
    assert all(measure in done.stdout for measure in measures)


def test_the_page_shows_the_published_figures(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import make_page

    assert make_page.PAGE.read_text() == make_page.make_page(json.loads(make_page.PUBLISHED.read_text()))
    for name in ("make_page", "measures"):
        del sys.modules[name]
