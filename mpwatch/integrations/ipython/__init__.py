"""The magic `%%ranks` runs a cell on ranks of a WorkerGroup, and `%ranks` returns the group.

`%load_ext mpwatch` loads both magics.

This module runs in the notebook's kernel or in a terminal's IPython. rank_cell.py runs in the ranks.

    cell --- compiled here, for SyntaxError ---> source, pushed variables ---> WorkerGroup.run(run_cell) ---> each rank
    table of values <--- RankValues <--- text of the last value, pulled variables <-------------------------- each rank
"""

import ast
import re
import shlex
import sys
from argparse import ArgumentParser
from html import escape
from types import FrameType
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class

import mpwatch
from mpwatch.integrations.ipython.rank_cell import Cell, run_cell


def register(shell: InteractiveShell) -> None:
    shell.register_magics(RankMagics(shell))


def unregister(shell: InteractiveShell) -> None:
    magics = shell.magics_manager.registry.get("RankMagics")
    if isinstance(magics, RankMagics):
        magics.close()
    for magic in shell.magics_manager.magics.values():
        magic.pop("ranks", None)


class RankValues(dict[int, str]):
    """The text of the value of a cell's last expression, by rank. A notebook shows it as a table."""

    def __repr__(self) -> str:
        return "\n".join(f"{_format_ranks(ranks)}: {text}" for text, ranks in self._group().items())

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th style='text-align:left'>{_format_ranks(ranks)}</th>"
            f"<td style='text-align:left'><pre>{escape(text)}</pre></td></tr>"
            for text, ranks in self._group().items()
        )
        return f"<table>{''.join(rows)}</table>"

    def _group(self) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for rank, text in self.items():
            groups.setdefault(text, []).append(rank)
        return groups


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"ranks: {message}; see %%ranks?")


def _parse_names(text: str) -> list[str]:
    return text.split(",")


def _parse_ranks(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


_PARSER = _Parser(prog="ranks", add_help=False, allow_abbrev=False)
_PARSER.add_argument("nprocs", nargs="?", type=int)
_PARSER.add_argument("--backend")
_PARSER.add_argument("--preload", type=_parse_names)
_PARSER.add_argument("--on", type=_parse_ranks)
_PARSER.add_argument("--push", type=_parse_names, default=[])
_PARSER.add_argument("--pull", type=_parse_names, default=[])
_PARSER.add_argument("--timeout", type=float)
_PARSER.add_argument("--close", action="store_true")


@magics_class
class RankMagics(Magics):
    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._group: mpwatch.WorkerGroup | None = None
        self._options: dict[str, Any] = {}  # of the group

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> "RankValues | mpwatch.WorkerGroup | None":
        """Run the cell on ranks that stay alive. Each rank has separate variables.

            %%ranks [NPROCS] [--backend B] [--preload M] [--on RANKS] [--push NAMES] [--pull NAMES] [--timeout SECONDS]
            %ranks [NPROCS] [--backend B] [--preload M]
            %ranks --close

        `%%ranks 4` starts four ranks, or uses the ranks that exist already. The variables of a rank are kept from cell to
        cell, until the ranks end. The notebook shows the value that the cell's last expression has in each rank. A semicolon
        after the last expression hides its value. `%ranks` returns the WorkerGroup. `%ranks --close` ends the ranks.

            NPROCS: number of ranks. Without NPROCS, the existing ranks run the cell.
            --backend: a backend of torch.distributed, such as gloo, nccl or auto. A cell on all ranks makes a process group.
            --preload: modules that the ranks import when they start, such as torch,numpy.
            --on: the ranks that run the cell, such as 0 or 0,2-3. Without --on, all ranks run the cell.
            --push: variables to copy to the ranks before the cell, such as x,y. Each rank gets its own value of a PerRank.
            --pull: variables to copy to the notebook after the cell. Each variable is then a dict of the values by rank.
            --timeout: time limit for this cell in seconds.
        """
        __tracebackhide__ = True
        options = _PARSER.parse_args(shlex.split(line, comments=True))
        if options.close:
            if cell is not None:
                raise UsageError("%%ranks --close would not run this cell; write %ranks --close in a line of its own")
            self.close()
            return None
        pushed = self._read_variables(options.push)
        body = None if cell is None else self._check_source(cell)
        group = self._get_group(options.nprocs, options.backend, options.preload)
        if body is None:
            if pushed or options.pull:
                raise UsageError("--push and --pull belong to %%ranks, with a cell; %ranks runs none")
            return group
        try:
            result = group.run(run_cell, (Cell(*body, options.pull),), pushed, ranks=options.on, timeout=options.timeout)
        except (TypeError, ValueError) as error:  # a rank that does not exist, for example
            raise UsageError(f"ranks: {error}") from None
        for name in options.pull:
            self.shell.user_ns[name] = {rank: outcome.pulled[name] for rank, outcome in result.items()}
        values = {rank: outcome.value for rank, outcome in result.items() if outcome.value is not None}
        return RankValues(values) if values else None

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _get_group(self, nprocs: int | None, backend: str | None, preload: list[str] | None) -> mpwatch.WorkerGroup:
        wanted: dict[str, Any] = {"nprocs": nprocs, "backend": backend, "preload": preload}
        wanted = {name: value for name, value in wanted.items() if value}
        if self._group is None or self._group.state is mpwatch.WorkerState.STOPPED:
            if nprocs is None:
                raise UsageError("there are no ranks yet; say how many, as in %%ranks 4")
            self._group, self._options = mpwatch.WorkerGroup(**wanted), wanted
        for name, value in wanted.items():
            if self._options.get(name) != value:
                raise UsageError(
                    f"the ranks have {name}={self._options.get(name)!r}, not {value!r}. To keep them, leave {name} out. "
                    "For new ranks, end these with %ranks --close, which deletes their variables"
                )
        return self._group

    def _read_variables(self, names: list[str]) -> dict[str, Any]:
        for name in names:
            if name not in self.shell.user_ns:
                raise UsageError(f"--push {','.join(names)}: there is no variable {name!r} here")
        return {name: self.shell.user_ns[name] for name in names}

    def _check_source(self, cell: str) -> tuple[str, str, bool]:
        """Return the cell's source, the name of its file, and whether the value of its last expression is shown. A blank
        line replaces the line with `%%ranks`, for the line numbers in tracebacks. Raises SyntaxError.
        """
        __tracebackhide__ = True
        source = f"\n{cell}"
        file = self.shell.compile.cache(source, self._find_cell_number())
        try:
            body = ast.parse(source, file).body
            compile(source, file, "exec", dont_inherit=True)  # finds errors that the parser does not see
        except SyntaxError as error:
            raise error.with_traceback(None) from None
        display_hook: Any = self.shell.displayhook
        is_quiet = display_hook.semicolon_at_end_of_expression(source)
        return source, file, bool(body) and isinstance(body[-1], ast.Expr) and not is_quiet

    def _find_cell_number(self) -> int:
        """Find the running cell by the file names of the call stack: `execution_count` can have the number of the next one
        already.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            name = self.shell.compile.format_code_name(frame.f_code.co_filename)
            if name is not None and (number := re.search(r"In\[(\d+)\]", " ".join(name))):
                return int(number[1])
            frame = frame.f_back
        return self.shell.execution_count


def _format_ranks(ranks: list[int]) -> str:
    parts: list[str] = []
    first = ranks[0]
    for rank, following in zip(ranks, [*ranks[1:], None], strict=True):
        if following != rank + 1:
            parts.append(f"{first}" if first == rank else f"{first}-{rank}")
            first = following if following is not None else first
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"
