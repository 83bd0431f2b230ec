"""Makes the HTML tables that a notebook shows for a result, an error and a WorkerGroup.

This module does no I/O, except that it reads the names of notebook cells from IPython.
"""

import re
from collections.abc import Sequence
from html import escape
from reprlib import Repr
from typing import Any

from mpwatch.options.worker_info import Worker
from mpwatch.results.clean_text import clean_text
from mpwatch.results.failure import ProcessFailure, format_ranks
from mpwatch.results.model import RunData, WorkerState
from mpwatch.results.report import (
    format_count,
    format_report,
    format_restarts,
    format_times,
    format_verdict,
    group_fates,
    make_attempt_rows,
    select_failed_attempts,
)
from mpwatch.wire.exceptions.source_lines import cell_name

STATES = {  # of a WorkerGroup between two calls
    WorkerState.INIT: "the ranks are starting",
    WorkerState.HEALTHY: "the ranks are ready",
    WorkerState.UNHEALTHY: "not all ranks are healthy; if ranks are lost, the next call restarts all of them",
    WorkerState.STOPPED: "closed",
}
FILE_OF_FRAME = re.compile(r'^  File "(.+)"(?=, line \d)', re.MULTILINE)  # in a traceback or a stack
TEXT_LIMIT = 100_000  # characters of a traceback or a stack
ROWS = 32  # return values that are shown; further ones are counted
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


def make_result_page(result: RunData[Any], picture: str) -> str:
    """Return an HTML page with the table, the timeline, the stacks and the report of a result.

    The page loads no other file, such as a style sheet or an image.

    Args:
        result: the result.
        picture: the timeline, as SVG.
    """
    stacks = "".join(_fold(f"Python stack of rank {rank}", stack) for rank, stack in result.stacks.items())
    report = "" if result.state is WorkerState.SUCCEEDED else _fold("the whole report", format_report(result))
    body = make_result_table(result, picture) + stacks + report
    return PAGE.format(title=_escape(_make_title(result)), body=body)


def _make_title(result: RunData[Any]) -> str:
    if result.state is not WorkerState.SUCCEEDED:
        return format_verdict(result)
    ranks = format_count(len(result.workers), "rank")
    return ", ".join(filter(None, [f"{ranks} succeeded", format_restarts(result)]))


def make_result_table(result: RunData[Any], picture: str = "") -> str:
    """Return the table of a result, as HTML.

    Args:
        result: the result.
        picture: the timeline, as SVG. It is placed below the table.
    """
    if result.state is WorkerState.SUCCEEDED:
        rows = [(f"rank {rank}", _get_short_repr(value)) for rank, value in list(result.return_values.items())[:ROWS]]
        more = len(result.return_values) - len(rows)
        return _table(_make_title(result), [*rows, *([("…", f"{more} more")] if more else [])]) + picture
    root = result.root_cause
    rows = [(format_ranks(ranks), fate) for fate, ranks in group_fates(result).items()]
    if text := format_restarts(result):
        rows.append(("all", text))
    rows += make_attempt_rows(select_failed_attempts(result))
    rows += [("", note) for note in result.notes]
    return _table(_make_title(result), rows) + picture + (_fold_failure(root) if root is not None else "")


def make_group_table(state: WorkerState, workers: Sequence[Worker], backend: str | None) -> str:
    """Return an HTML table of a WorkerGroup, with its state and the number of restarts."""
    restarts = max((worker.restart_count for worker in workers), default=0)
    rows = [
        ("state", f"{state.name}: {STATES[state]}"),
        ("restarts", format_times(restarts) if restarts else "never"),
        *([("backend", backend)] if backend else []),
    ]
    return _table(f"WorkerGroup of {format_ranks(worker.rank for worker in workers)}", rows)


def _get_short_repr(value: object) -> str:
    try:
        return _short.repr(value)
    except BaseException:  # noqa: BLE001  __repr__ is user code, and reprlib trusts the names of classes
        return f"<{type(value).__qualname__}>"


def _table(caption: str, rows: list[tuple[str, str]]) -> str:
    body = "".join(
        f'<tr><th style="text-align:left">{_escape(name)}</th><td style="text-align:left">{_escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<table><caption style="text-align:left"><b>{_escape(caption)}</b></caption><tbody>{body}</tbody></table>'


def _fold_failure(failure: ProcessFailure) -> str:
    text = failure.traceback or failure.stack or failure.stderr
    name = "traceback" if failure.traceback else "Python stack" if failure.stack else "what it printed"
    return _fold(f"{name} of rank {failure.rank}", text)


def _fold(summary: str, text: str) -> str:
    """Return HTML that shows the text when the reader clicks on the summary."""
    text = FILE_OF_FRAME.sub(_name_cell, text)
    if len(text) > TEXT_LIMIT:
        text = f"{text[: TEXT_LIMIT // 2]}\n[...]\n{text[-TEXT_LIMIT // 2 :]}"
    return f"<details><summary>{_escape(summary)}</summary><pre>{_escape(text)}</pre></details>" if text else ""


def _name_cell(match: re.Match[str]) -> str:
    cell = cell_name(match[1])
    return f"  {cell}" if cell else match[0]


def _escape(text: str) -> str:
    return escape(clean_text(text))
