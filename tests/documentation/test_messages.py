"""The messages that the documentation explains are in the code of the package."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "messages.md").read_text()
MESSAGES = re.findall(r"^\| (`{1,2})(.+?)\1 \|", PAGE, re.MULTILINE)


def texts_of(node):
    """Yield the texts of a module, each with `...` for the parts that are filled in."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from texts_of(child)


@pytest.fixture(scope="module")
def texts():
    modules = (ast.parse(path.read_text()) for path in (ROOT / "mpwatch").rglob("*.py"))
    found = "\n".join(text for module in modules for text in texts_of(module))
    return re.sub(r"%[sd]|\{\w*\}", "...", found)


def test_the_page_has_messages():
    assert len(MESSAGES) > 40


@pytest.mark.parametrize("message", [message for _, message in MESSAGES])
def test_the_message_is_in_the_code(message, texts):
    parts = [part.strip() for part in message.split("...") if len(part.strip()) > 5]
    assert parts
    assert [part for part in parts if part not in texts] == []
