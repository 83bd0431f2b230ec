"""Tables and foldable texts in HTML, for notebooks and for the page of a result."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from reprlib import Repr

from mpwatch.results.texts import clean_text
from mpwatch.wire.exceptions.source_lines import cell_name

FILE_OF_FRAME = re.compile(r'^  File "(.+)"(?=, line \d)', re.MULTILINE)  # in a traceback or a stack
TEXT_LIMIT = 100_000  # characters of a traceback or a stack
_short = Repr()
_short.maxstring = _short.maxother = 80

PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
  :root {{ color-scheme: light dark }}
  body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em }}
  th, td {{ padding: .1em 1em .1em 0; vertical-align: top }}
  pre {{ overflow-x: auto; font-size: 12px }}
  svg {{ margin: 1em 0 }}
</style></head>
<body>
{body}
</body></html>
"""


def make_page(title: str, body: str) -> str:
    return PAGE.format(title=_escape(title), body=body)


def make_table(caption: str, rows: Iterable[Sequence[str]], *, head: Sequence[str] = (), bar: str = "") -> str:
    """`bar` is HTML before the caption. Without a `head`, the first cell of each row is its name."""
    names = 0 if head else 1
    body = "".join(f"<tr>{_cells('th', row[:names])}{_cells('td', row[names:])}</tr>" for row in rows)
    top = f"<thead><tr>{_cells('th', head)}</tr></thead>" if head else ""
    caption = f'<caption style="text-align:left">{bar}<b>{_escape(caption)}</b></caption>'
    return f"<table>{caption}{top}<tbody>{body}</tbody></table>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f'<{tag} style="text-align:left">{_escape(text)}</{tag}>' for text in texts)


def fold(summary: str, text: str) -> str:
    """Return HTML that shows the text when the reader clicks on the summary."""
    text = FILE_OF_FRAME.sub(lambda frame: f"  {cell}" if (cell := cell_name(frame[1])) else frame[0], text)
    if len(text) > TEXT_LIMIT:
        text = f"{text[: TEXT_LIMIT // 2]}\n[...]\n{text[-TEXT_LIMIT // 2 :]}"
    return f"<details><summary>{_escape(summary)}</summary><pre>{_escape(text)}</pre></details>" if text else ""


def get_short_repr(value: object) -> str:
    try:
        return _short.repr(value)
    except BaseException:  # noqa: BLE001  __repr__ is user code, and reprlib trusts the names of classes
        return f"<{type(value).__qualname__}>"


def _escape(text: str) -> str:
    return escape(clean_text(text))
