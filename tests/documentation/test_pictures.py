"""The scripts in docs/ still make the pictures of the README and of the pages from real runs."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("pyte")

from support.programs import ENV, python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "docs" / "live_view.svg"


def read_svg_text(image):
    """Return the text of an SVG file with plain blanks."""
    return image.read_text().replace("&#160;", " ")


@pytest.fixture(scope="module")
def new_image(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "live_view.svg"
    few = ("150", "13")  # steps, and per cent
    python("-W", "default", str(ROOT / "docs" / "live_view.py"), str(path), *few, env={**ENV, "PYTHONWARNINGS": "default"})
    return read_svg_text(path)


def test_the_image_shows_the_ranks(new_image):
    for image, steps in ((new_image, 150), (read_svg_text(IMAGE), 1000)):
        assert image.count(f" of {steps}") == 5
        assert len(re.findall(r"(>|  )running\b", image)) == 4
        assert image.count("loss ") == 5
        assert image.count(" MB") == 4
        assert "4 ranks running" in image
        assert "of the points are told apart" in image
    assert ">running, slow (" in read_svg_text(IMAGE)


def test_the_report_shows_the_verdict(tmp_path):
    python(str(ROOT / "docs" / "failure_report.py"), str(tmp_path / "report.svg"))
    for picture in (tmp_path / "report.svg", ROOT / "docs" / "failure_report.svg"):
        text = read_svg_text(picture)
        assert (
            "RunFailedError: rank 2 failed first: ValueError: shard 2 has 17 columns, not 16 (crash.py:15 in load)" in text
        )
        assert "ranks 0-1, 3: stopped by the watcher in all_reduce" in text
        assert str(ROOT) not in text


def test_the_timeline_shows_the_failure_and_the_restart(tmp_path):
    python(str(ROOT / "docs" / "timeline.py"), str(tmp_path / "timeline.svg"))
    for picture in (tmp_path / "timeline.svg", ROOT / "docs" / "timeline.svg"):
        svg = ElementTree.parse(picture)
        texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
        assert [text for text in texts if text.startswith("rank ")] == [f"rank {rank}" for rank in range(4)]
        assert texts.count("succeeded, restarted once") == 4
        titles = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}title")]
        assert "rank 2: ConnectionError: the data server is down" in "\n".join(titles)
