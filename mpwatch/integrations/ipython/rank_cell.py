"""Runs the cell of a `%%ranks` magic. This module is used in a rank, so it must not import IPython."""

import ast
import linecache
from dataclasses import dataclass
from typing import Any

import mpwatch

MAX_CHARACTERS = 10_000  # of the text of a value
NAMESPACE = "mpwatch: variables of the cells"  # a key of `current_worker().state`


@dataclass(frozen=True)
class Cell:
    """A cell that the notebook sends to each rank. The notebook has already checked the syntax of the cell."""

    source: str
    file: str
    """The name that IPython has given to the source, for tracebacks."""
    has_value: bool
    """Whether the last statement is an expression whose value is shown."""
    pulled: list[str]
    """Names of variables to send back."""


@dataclass(frozen=True)
class CellOutcome:
    value: str | None
    """The text of the value of the last expression, or None if there is no value to show."""
    pulled: dict[str, Any]


def run_cell(cell: Cell, /, **pushed: Any) -> CellOutcome:
    """Run the cell with the variables of earlier cells and of `--push`. Raises the exception of the cell."""
    __tracebackhide__ = True
    state = mpwatch.current_worker().state
    variables: dict[str, Any] = state.setdefault(NAMESPACE, {"__name__": "__main__"})
    variables.update(pushed)
    lines = cell.source.splitlines(keepends=True)
    linecache.cache[cell.file] = (len(cell.source), None, lines, cell.file)  # for inspect.getsource and tracebacks
    tree = ast.parse(cell.source, cell.file)
    last = tree.body.pop() if cell.has_value else None
    exec(compile(tree, cell.file, "exec", dont_inherit=True), variables)  # noqa: S102  the user's own cell
    value = None
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), cell.file, "eval", dont_inherit=True), variables)  # noqa: S307
    missing = [name for name in cell.pulled if name not in variables]
    if missing:
        raise NameError(f"--pull: rank {mpwatch.current_worker().rank} has no variable {missing[0]!r}", name=missing[0])
    return CellOutcome(None if value is None else _format(value), {name: variables[name] for name in cell.pulled})


def _format(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ... ({len(text)} characters)"
