"""The code of the pages, without sybil: `tox run -e docs` runs it."""

import re
from pathlib import Path

import pytest

import mpwatch

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r'^```python title="(?!Cell)([^"]*)"\n(.*?)^```', re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", sorted(path for path in DOCS.rglob("*.md") if BLOCK.search(path.read_text())), ids=lambda page: page.stem
)
def test_the_code_of_the_page_compiles(page):
    for title, code in BLOCK.findall(page.read_text()):
        if not code.startswith("--8<--"):  # an example, which has tests of its own
            compile(code, f"{page.name}: {title}", "exec")


def test_the_restart_policy_of_the_page_is_valid():
    blocks = dict(BLOCK.findall((DOCS / "how-to" / "restart.md").read_text()))
    names = {"mpwatch": mpwatch}
    exec(blocks["policy.py"].partition("result = ")[0], names)
    assert mpwatch.FailureKind.OOM in names["policy"].causes
