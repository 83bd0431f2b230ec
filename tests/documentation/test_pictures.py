"""The scripts in docs/ still make the pictures of the README and of the pages from real runs."""

from pathlib import Path

import pytest

pytest.importorskip("pyte")

from support.programs import ENV, python

ROOT = Path(__file__).parents[2]
VERDICT = "RunFailedError: rank 2 failed first: ValueError: shard 2 has 17 columns, not 16 (crash.py:15 in load)"
RESTARTS = {"succeeded, restarted once": 4, "rank 2: ConnectionError: the data server is down": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "args", "counts"),
    [
        ("live_view", ("150", "13"), {"loss ": 5, " MB": 4, "4 ranks running": 1}),  # few steps, and per cent
        ("failure_report", (), {VERDICT: 1, "ranks 0-1, 3: stopped by the watcher in all_reduce": 1, str(ROOT): 0}),
        ("timeline", (), {**RESTARTS, **{f">rank {rank}<": 1 for rank in range(4)}}),
    ],
)
def test_a_picture_that_is_made_now_and_that_of_the_page_show_the_same(name, args, counts, tmp_path):
    picture = tmp_path / f"{name}.svg"
    env = {**ENV, "PYTHONWARNINGS": "default"}
    python("-W", "default", str(ROOT / "docs" / f"{name}.py"), str(picture), *args, env=env)
    for image in (picture, ROOT / "docs" / f"{name}.svg"):
        text = image.read_text().replace("&#160;", " ")
        assert {words: text.count(words) for words in counts} == counts
