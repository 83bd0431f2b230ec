"""The picture in the README is one of a real run: the script that makes it still does."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

pytest.importorskip("pyte")

from programs import ENV, python

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "live_view.svg"


def words_of(picture):
    """Blanks of a picture are such as do not break."""
    return picture.read_text().replace("&#160;", " ")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "live_view.svg"
    few = ("150", "13")  # steps, and per cent
    python("-W", "default", str(ROOT / "docs" / "live_view.py"), str(path), *few, env={**ENV, "PYTHONWARNINGS": "default"})
    return words_of(path)


def test_it_shows_the_ranks(made):
    for picture, steps in ((made, 150), (words_of(PICTURE), 1000)):
        assert picture.count(f" of {steps}") == 5
        assert picture.count(">at work<") + picture.count("  at work") >= 4
        assert picture.count("loss ") == 5
        assert picture.count(" MB") == 4
        assert "4 ranks at work" in picture
        assert "of the points are told apart" in picture


def test_it_is_shown():
    assert f"({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()
