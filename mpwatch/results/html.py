"""What a notebook shows of a result and of a group: a small table, as HTML. Pure, but for the names of its cells."""

import re
from collections.abc import Sequence
from html import escape
from reprlib import Repr
from typing import Any

from mpwatch.options.worker_info import Worker
from mpwatch.results.model import ProcessFailure, RunData, WorkerState
from mpwatch.results.report import attempt_rows, failed_attempts, fates, ranks_text, restarts_text, times_text, verdict
from mpwatch.wire.exceptions.source_lines import cell_name

STATES = {  # of a group, for who looks at it between two calls
    WorkerState.INIT: "the ranks are starting",
    WorkerState.HEALTHY: "the ranks are there",
    WorkerState.UNHEALTHY: "not all ranks are well; if they are lost, the next call starts all of them anew",
    WorkerState.STOPPED: "closed",
}
FRAME = re.compile(r'^  File "(.+)"(?=, line \d)', re.MULTILINE)
TEXT_LIMIT = 100_000  # characters of a traceback
ROWS = 32  # values of ranks that are shown; more are counted
_short = Repr()
_short.maxstring = _short.maxother = 80


def table_of(result: RunData[Any]) -> str:
    """The values by rank; or the verdict, what became of whom, and of each attempt, and the traceback or stack of the
    failure.
    """
    if result.state is WorkerState.SUCCEEDED:
        rows = [(f"rank {rank}", _repr(value)) for rank, value in list(result.return_values.items())[:ROWS]]
        more = len(result.return_values) - len(rows)
        restarts = f", {text}" if (text := restarts_text(result)) else ""
        return _table(
            f"{len(result.workers)} ranks succeeded{restarts}", [*rows, *([("…", f"{more} more")] if more else [])]
        )
    root = result.root_cause
    rows = [(ranks_text(ranks), fate) for fate, ranks in fates(result).items()]
    if text := restarts_text(result):
        rows.append(("all", text))
    rows += attempt_rows(failed_attempts(result))
    return _table(verdict(result), rows) + (_unfolding(root) if root is not None else "")


def group_table(state: WorkerState, workers: Sequence[Worker], backend: str | None) -> str:
    """How the ranks of a WorkerGroup are, and how often they have been started anew."""
    restarts = max((worker.restart_count for worker in workers), default=0)
    rows = [
        ("state", f"{state.name}: {STATES[state]}"),
        ("started anew", times_text(restarts) if restarts else "never"),
        *([("backend", backend)] if backend else []),
    ]
    return _table(f"WorkerGroup of {ranks_text(worker.rank for worker in workers)}", rows)


def _repr(value: object) -> str:
    try:
        return _short.repr(value)
    except BaseException:  # noqa: BLE001  the value's own code, and reprlib goes by the names of classes
        return f"<{type(value).__qualname__}>"


def _table(caption: str, rows: list[tuple[str, str]]) -> str:
    body = "".join(
        f'<tr><th style="text-align:left">{_html(who)}</th><td style="text-align:left">{_html(what)}</td></tr>'
        for who, what in rows
    )
    return f'<table><caption style="text-align:left"><b>{_html(caption)}</b></caption><tbody>{body}</tbody></table>'


def _unfolding(failure: ProcessFailure) -> str:
    text = FRAME.sub(_frame, failure.traceback or failure.stack or failure.stderr)
    name = "traceback" if failure.traceback else "Python stack" if failure.stack else "what it printed"
    if len(text) > TEXT_LIMIT:
        text = f"{text[: TEXT_LIMIT // 2]}\n[...]\n{text[-TEXT_LIMIT // 2 :]}"
    return f"<details><summary>{name} of rank {failure.rank}</summary><pre>{_html(text)}</pre></details>" if text else ""


def _frame(match: re.Match[str]) -> str:
    cell = cell_name(match[1])
    return f"  {cell}" if cell else match[0]


def _html(text: str) -> str:
    """Escaped; and what no encoding can say is said by its number."""
    return escape(text.encode(errors="backslashreplace").decode())
