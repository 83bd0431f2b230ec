"""Tables and foldable texts in HTML, for notebooks and for the page of a result."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from reprlib import Repr

from mpwatch.options.worker_info import Worker
from mpwatch.results.clean_text import clean_text
from mpwatch.results.failure import format_ranks
from mpwatch.results.model import WorkerState
from mpwatch.results.report import format_times
from mpwatch.wire.exceptions.source_lines import cell_name

STATES = {  # of a WorkerGroup between two calls
    WorkerState.INIT: "the ranks are starting",
    WorkerState.HEALTHY: "the ranks are ready",
    WorkerState.UNHEALTHY: "not all ranks are healthy; if ranks are lost, the next call restarts all of them",
    WorkerState.STOPPED: "closed",
}
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


def make_table(caption: str, rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(
        f'<tr><th style="text-align:left">{_escape(name)}</th><td style="text-align:left">{_escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<table><caption style="text-align:left"><b>{_escape(caption)}</b></caption><tbody>{body}</tbody></table>'


def make_group_table(state: WorkerState, workers: Sequence[Worker], backend: str | None) -> str:
    restarts = max((worker.restart_count for worker in workers), default=0)
    rows = [
        ("state", f"{state.name}: {STATES[state]}"),
        ("restarts", format_times(restarts) if restarts else "never"),
        *([("backend", backend)] if backend else []),
    ]
    return make_table(f"WorkerGroup of {format_ranks(worker.rank for worker in workers)}", rows)


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
