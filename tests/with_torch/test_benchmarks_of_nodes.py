"""The benchmarks of several nodes run. They need torch."""

import json
import sys
from pathlib import Path

import pytest

from support.programs import python

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[1] / "benchmarks" / "bench.py"


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks run on Linux only")
def test_the_start_and_the_failure_of_two_nodes_are_timed(tmp_path):
    path = tmp_path / "results.json"
    python(str(BENCH), "nodes_start", "nodes_failure", "-l", "mpwatch", "-r", "1", "-o", str(path))
    started, failed = json.loads(path.read_text())["rows"]
    for row, figure in (started, "entered"), (failed, "stopped"):
        assert (row["figure"], row["taken"], row["errors"], row["left"]) == (figure, 1, [], [])
        assert 0 < row["median"] < 60
