"""The program of the page about several nodes, run as two nodes of this machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.ports import free_port
from support.programs import ENV

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "several-nodes.md"


@pytest.mark.slow
def test_two_nodes_print_the_values_of_their_own_ranks(tmp_path):
    text = PAGE.read_text()
    (code,) = re.findall(r'```python title="train.py"\n(.*?)```', text, re.DOTALL)
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
