"""Benchmarks of several nodes can be taken, for which torch is needed."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from programs import python

BENCH = Path(__file__).parents[1] / "benchmarks" / "bench.py"


@pytest.mark.skipif(sys.platform != "linux", reason="benchmarks are taken on Linux")
def test_two_nodes_are_timed_as_they_start_and_as_they_fail(tmp_path):
    kept = tmp_path / "kept.json"
    python(str(BENCH), "nodes_start", "nodes_failure", "-l", "mpwatch", "-r", "1", "-o", str(kept))
    started, failed = json.loads(kept.read_text())["rows"]
    for row, figure in (started, "entered"), (failed, "stopped"):
        assert (row["figure"], row["taken"], row["errors"], row["left"]) == (figure, 1, [], [])
        assert 0 < row["median"] < 60
