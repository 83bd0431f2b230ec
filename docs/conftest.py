"""Run the code of all pages: `pytest docs`. tests/documentation/pages.py says how a page says what its code prints."""

import sys
from pathlib import Path

from sybil import Sybil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "documentation"))

from pages import parse

pytest_collect_file = Sybil(parsers=[parse], patterns=["*.md"]).pytest()
