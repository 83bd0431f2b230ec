"""The words of the project: names and phrases that were replaced by standard terms do not come back.

`banned_words.tsv` has a row for each: the word, what to write instead, the kind of the word, and where the row holds.

- kind "module": no module of the package has this dotted name;
- kind "name": no identifier in code, and no code span in a text, is this word (case matters);
- kind "text": no text has this phrase (case does not matter): docstrings, comments, messages, README, docs.

`where` is a path that the row is limited to. It is empty where the row holds for all of mpwatch/, docs/ and the texts at the top.
"""

import csv
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
LIST = (Path(__file__).parent / "banned_words.tsv").read_text()
ROWS = list(csv.DictReader(LIST.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
CODE_SPAN = re.compile(r"``?([^`\n]+)``?")
WORD = re.compile(r"\w+")
FSTRING_MIDDLE = getattr(tokenize, "FSTRING_MIDDLE", None)  # a part of an f-string, from Python 3.12 on


def files():
    yield from (path for folder in ("mpwatch", "docs") for path in sorted((TOP / folder).rglob("*.py")))
    yield from sorted(TOP.glob("*.md"))
    yield from sorted((TOP / "docs").rglob("*.md"))


@cache
def names_and_text(path):
    """The identifiers of a file with their lines, and its text, in which runs of white space are one blank."""
    text = path.read_text()
    if path.suffix != ".py":
        return identifiers_in_spans(text), collapse(text)
    names, texts = [], []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            names.append((token.string, token.start[0]))
        elif token.type in (tokenize.STRING, tokenize.COMMENT, FSTRING_MIDDLE):
            # what stands between two parts of an f-string separates their words
            texts.append(token.string + "{}" if token.type == FSTRING_MIDDLE else token.string)
            names += [(name, token.start[0] + line) for name, line in identifiers_in_spans(token.string)]
    return names, collapse("\n".join(texts))


def identifiers_in_spans(text):
    spans = ((span, text.count("\n", 0, span.start())) for span in CODE_SPAN.finditer(text))
    return [(word, line) for span, line in spans for word in WORD.findall(span.group(1))]


def collapse(text):
    return re.sub(r"[\s#]+", " ", text)


def holds_in(row, path):
    return str(path.relative_to(TOP)).startswith(row["where"])


@pytest.mark.parametrize("path", list(files()), ids=lambda path: str(path.relative_to(TOP)))
def test_no_banned_word(path):
    names, text = names_and_text(path)
    found = {}
    for name, line in names:
        found.setdefault(name, line)
    wrong = [
        f"line {found[row['word']]}: {row['word']}: write {row['instead']}"
        for row in ROWS
        if row["kind"] == "name" and row["word"] in found and holds_in(row, path)
    ]
    wrong += [
        f"...{text[max(0, match.start() - 30) : match.end() + 30]}...: write {row['instead']}"
        for row in ROWS
        if row["kind"] == "text" and holds_in(row, path)
        for match in re.finditer(rf"\b{re.escape(row['word'])}\b", text, re.IGNORECASE)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_has_an_old_name():
    package = TOP / "mpwatch"
    modules = {".".join(path.relative_to(package).with_suffix("").parts) for path in package.rglob("*.py")}
    assert not modules & {row["word"] for row in ROWS if row["kind"] == "module"}


def test_the_list_is_in_order():
    """One row for each word and place, and no row without a replacement."""
    keys = [(row["word"], row["kind"], row["where"]) for row in ROWS]
    assert len(keys) == len(set(keys))
    assert all(row["instead"] and row["kind"] in ("module", "name", "text") for row in ROWS)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("name", "def bury(): ..."),
        ("name", '"""Calls `bury`."""'),
        ("text", '"""Waits for ever."""'),
        ("text", "x = 1  # in vain"),
    ],
)
def test_a_banned_word_is_found(kind, source, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(source)
    names, text = names_and_text(path)
    words = {row["word"] for row in ROWS if row["kind"] == kind}
    assert words & {name for name, _ in names} if kind == "name" else any(word in text for word in words)
