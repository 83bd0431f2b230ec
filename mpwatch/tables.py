"""What a notebook shows of a result: a small table, as HTML. Pure."""

from html import escape
from reprlib import Repr
from typing import Any

from .report import fates, ranks_text, verdict
from .result import ProcessFailure, RunResult, WorkerState

__all__ = ["table_of"]

ROWS = 32  # values of ranks that are shown; more are counted
_short = Repr()
_short.maxstring = _short.maxother = 80


def table_of(result: RunResult[Any]) -> str:
    """The values by rank; or the verdict, what became of whom, and the traceback or stack of the failure."""
    if result.state is WorkerState.SUCCEEDED:
        rows = [(f"rank {rank}", _short.repr(value)) for rank, value in list(result.return_values.items())[:ROWS]]
        more = len(result.return_values) - len(rows)
        return _table(f"{len(result.workers)} ranks succeeded", [*rows, *([("…", f"{more} more")] if more else [])])
    root = result.root_cause
    rows = [(ranks_text(ranks), fate) for fate, ranks in fates(result).items()]
    return _table(verdict(result), rows) + (_unfolding(root) if root is not None else "")


def _table(caption: str, rows: list[tuple[str, str]]) -> str:
    body = "".join(
        f'<tr><th style="text-align:left">{escape(who)}</th><td style="text-align:left">{escape(what)}</td></tr>'
        for who, what in rows
    )
    return f'<table><caption style="text-align:left"><b>{escape(caption)}</b></caption><tbody>{body}</tbody></table>'


def _unfolding(failure: ProcessFailure) -> str:
    text = failure.traceback or failure.stack or failure.stderr
    name = "traceback" if failure.traceback else "Python stack" if failure.stack else "what it printed"
    return f"<details><summary>{name} of rank {failure.rank}</summary><pre>{escape(text)}</pre></details>" if text else ""
