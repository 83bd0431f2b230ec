"""The programs of the pages compile, and the page of several nodes runs. `tox run -e docs` runs all programs, with sybil."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.ports import free_port
from support.programs import ENV

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r'^```python title="(?!Cell)([^"]*)"\n(.*?)^```', re.MULTILINE | re.DOTALL)


def test_the_programs_of_the_pages_compile():
    blocks = [(page, *block) for page in sorted(DOCS.rglob("*.md")) for block in BLOCK.findall(page.read_text())]
    assert len(blocks) > 40
    for page, title, code in blocks:
        if not code.startswith("--8<--"):  # an example, which has tests of its own
            compile(code, f"{page.name}: {title}", "exec")


@pytest.mark.slow
def test_two_nodes_print_the_values_of_their_own_ranks(tmp_path):
    text = (DOCS / "how-to" / "several-nodes.md").read_text()
    (code,) = (code for title, code in BLOCK.findall(text) if title == "train.py")
    Path(tmp_path, "train.py").write_text(code)
    command = [sys.executable, "train.py", f"127.0.0.1:{free_port()}"]
    nodes = [
        subprocess.Popen(command, cwd=tmp_path, env=ENV | {"PYTHONWARNINGS": "ignore"}, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = sorted(node.communicate(timeout=100)[0].strip() for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0]
    assert all(f"`{line}`" in text for line in printed), printed
    assert len(set(printed)) == 2
