"""The scripts in docs/ still make the pictures of the README and of the pages from real runs."""

import shutil
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("pyte")

from support.programs import ENV, python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
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
        assert image.count(">running<") + image.count("  running") >= 4
        assert image.count("loss ") == 5
        assert image.count(" MB") == 4
        assert "4 ranks running" in image
        assert "of the points are told apart" in image


def test_the_readme_shows_the_image():
    assert f"({IMAGE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_the_timeline_shows_the_failure_and_the_restart(tmp_path):
    python(str(ROOT / "docs" / "timeline.py"), str(tmp_path / "timeline.svg"))
    for picture in (tmp_path / "timeline.svg", ROOT / "docs" / "timeline.svg"):
        svg = ElementTree.parse(picture)
        texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
        assert [text for text in texts if text.startswith("rank ")] == [f"rank {rank}" for rank in range(4)]
        assert texts.count("succeeded, restarted once") == 4
        titles = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}title")]
        assert "failed first: ConnectionError: the data server is down" in "\n".join(titles)


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason=f"needs {' or '.join(BROWSERS)}")
def test_the_pictures_of_a_result_have_the_colours_of_their_themes(tmp_path):
    python(str(ROOT / "docs" / "notebook_result.py"), str(tmp_path))
    for folder in (tmp_path, ROOT / "docs"):
        pictures = [folder / f"notebook_result_{theme}.png" for theme in ("light", "dark")]
        assert all(picture.stat().st_size > 40_000 for picture in pictures), "an empty page has fewer bytes"
        light, dark = map(read_first_pixel, pictures)
        assert min(light) > 200
        assert max(dark) < 60


def read_first_pixel(picture):
    """Return red, green and blue of the pixel at the top left of a PNG file."""
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    position, packed = 8, b""
    while position < len(data):
        size = int.from_bytes(data[position : position + 4])
        if data[position + 4 : position + 8] == b"IDAT":
            packed += data[position + 8 : position + 8 + size]
        position += size + 12  # length, type and checksum
    return tuple(zlib.decompress(packed)[1:4])  # after the filter of the row, which changes no first pixel
