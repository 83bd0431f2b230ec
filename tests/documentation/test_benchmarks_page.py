"""The page of benchmarks is made from the published figures, each with its date, machine and command."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def make_page(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import make_page

    yield make_page
    for name in ("make_page", "measures"):
        sys.modules.pop(name, None)


def test_the_page_is_up_to_date(make_page):
    records = json.loads(make_page.PUBLISHED.read_text())
    assert make_page.PAGE.read_text() == make_page.make_page(records), "run python tests/benchmarks/make_page.py"


def test_each_record_has_date_machine_and_command(make_page):
    for record in json.loads(make_page.PUBLISHED.read_text()):
        assert all(record[name] for name in ("date", "machine", "command"))


def test_the_command_of_each_record_takes_its_measures(make_page):
    for record in json.loads(make_page.PUBLISHED.read_text()):
        program, script, *words = record["command"].split()
        assert (program, script) == ("python", "tests/benchmarks/bench.py")
        measures = set(words[: words.index("-r")] if "-r" in words else words)
        assert {row["measure"] for row in record["rows"]} <= measures <= set(make_page.MEASURES)


def test_new_results_replace_older_ones(make_page):
    old = {"date": "2026-01-01", "machine": "m", "command": "c", "note": "", "rows": []}
    old["rows"] = [
        {"measure": measure, "figure": "entered", "launcher": "mpwatch", "median": 1.0}
        for measure in ("start", "start_torch")
    ]
    machine = {"when": "2026-02-02T00:00:00", "cpus": 2, "system": "Linux", "python": "3.11", "torch": "2.13", "load": 0.1}
    rows = [{"measure": "start", "figure": "entered", "launcher": name, "median": 2.0} for name in ("mpwatch", "elastic")]
    records = make_page.add_results([old], {"machine": machine, "rounds": 5, "rows": rows}, ["start"])
    assert [(record["date"], [row["measure"] for row in record["rows"]]) for record in records] == [
        ("2026-01-01", ["start_torch"]),
        ("2026-02-02", ["start", "start"]),
    ]
    assert "bench.py start -r 5" in make_page.make_page(records)
