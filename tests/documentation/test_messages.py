"""The messages that the documentation explains are in the code of the package."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "messages.md"


def texts_of(node):
    """Yield the texts of a module, each with `...` for the parts that are filled in."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from texts_of(child)


def test_each_message_of_the_page_is_in_the_code():
    modules = (ast.parse(path.read_text()) for path in (ROOT / "mpwatch").rglob("*.py"))
    texts = re.sub(r"%[sd]|\{\w*\}", "...", "\n".join(text for module in modules for text in texts_of(module)))
    messages = [message for _, message in re.findall(r"^\| (`{1,2})(.+?)\1 \|", PAGE.read_text(), re.MULTILINE)]
    assert len(messages) > 40
    parts = [part.strip() for message in messages for part in message.split("...") if len(part.strip()) > 5]
    assert [part for part in parts if part not in texts] == []
