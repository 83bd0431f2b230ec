"""Print sentences of README.md, docs/ and the docstrings, chosen at random, for a reader who judges whether each one is clear.

python tests/documentation/sample_sentences.py [COUNT] [SEED]
"""

import ast
import random
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE_BLOCK = re.compile(r"^( *)(```|~~~).*?^\1\2$", re.MULTILINE | re.DOTALL)
NO_PROSE = re.compile(r"\s*(#|\||!\[|<|:::|-{3}|\?{3}|!{3}|={3} )")  # headings, tables, pictures, directives
LIST_ITEM = re.compile(r"^\s*([-*]|\d+\.) ")
NO_PARAGRAPH = re.compile(r"^(    |Args:|Returns:|Raises:)", re.MULTILINE)
END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\[*]|(?:multiprocessing|mpwatch|torch|gloo|pytest|cloudpickle)\b)")


def read_markdown(path):
    """Return the paragraphs of a page, without its code, headings and tables."""
    lines = CODE_BLOCK.sub("", path.read_text()).splitlines()
    return "\n".join("" if NO_PROSE.match(line) else LIST_ITEM.sub("\n\n", line) for line in lines).split("\n\n")


def read_docstrings(path):
    """Yield the name and the paragraphs of each docstring of a module, without drawings and lists of arguments."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = "\n".join(LIST_ITEM.sub("\n", line) for line in (ast.get_docstring(node) or "").splitlines())
            paragraphs = docstring.split("\n\n")
            yield getattr(node, "name", ""), [p for p in paragraphs if not NO_PARAGRAPH.search(p)]


def split_sentences(paragraphs):
    """Return the whole sentences, each with five words or more."""
    sentences = [s for p in paragraphs for s in END_OF_SENTENCE.split(" ".join(p.split()))]
    return [s for s in sentences if len(s.split()) >= 5 and s[-1] in ".!?"]


def sample_sentences(count, seed):
    """Return places and sentences, half of them from pages and half from docstrings."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    modules = sorted((ROOT / "mpwatch").rglob("*.py"))
    on_pages = [(path.relative_to(ROOT), s) for path in pages for s in split_sentences(read_markdown(path))]
    in_docstrings = [
        (f"{path.relative_to(ROOT)} {name}", s)
        for path in modules
        for name, paragraphs in read_docstrings(path)
        for s in split_sentences(paragraphs)
    ]
    choose = random.Random(seed).sample
    return choose(on_pages, count // 2) + choose(in_docstrings, count - count // 2)


if __name__ == "__main__":
    count, seed = (list(map(int, sys.argv[1:])) + [100, 0][len(sys.argv) - 1 :])[:2]
    for number, (place, sentence) in enumerate(sample_sentences(count, seed), 1):
        print(f"{number}. [{place}] {sentence}")
