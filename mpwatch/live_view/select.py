"""Selects how the live view of a call is shown, and imports the modules of the view only when they are needed.

progress=False    no view
progress=None     a view in a notebook or a terminal, which appears when a rank first calls report()
progress=True     a view everywhere, from the start of the call; if there is no terminal, lines on stderr
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpwatch.live_view.tty import find_terminal
from mpwatch.options.log_spec import in_notebook

if TYPE_CHECKING:
    from mpwatch.live_view.live import Ask, Display, LiveView


MakeView = Callable[["Ask"], "LiveView | None"]


def select_view(progress: bool | None, ask: "Ask") -> "LiveView | None":
    if not may_show(progress):
        return None
    from mpwatch.live_view.live import LiveView

    return LiveView(lambda: select_display(allow_lines=progress is True), ask, starts_at_once=progress is True)


def may_show(progress: bool | None) -> bool:
    return progress is not False and (progress is True or in_notebook() or find_terminal() is not None)


def select_display(*, allow_lines: bool) -> "Display | None":
    """Return a display for the notebook or the terminal; without one a LineDisplay on stderr, if `allow_lines`."""
    if in_notebook():
        from mpwatch.live_view.notebook import NotebookDisplay

        return NotebookDisplay()
    terminal = find_terminal()
    if terminal is not None:
        try:
            from mpwatch.live_view.terminal import TerminalDisplay
        except ImportError:  # rich is not installed
            allow_lines = True
        else:
            if not TerminalDisplay.is_in_use:
                return TerminalDisplay(terminal)
    if allow_lines and sys.stderr is not None:
        from mpwatch.live_view.live import LineDisplay

        return LineDisplay(sys.stderr)
    return None
