"""Select how the live view of a call is shown.

    progress=False    no view
    progress=None     a view in a notebook or a terminal, which appears when a rank first calls report()
    progress=True     a view everywhere, from the start of the call; if there is no terminal, lines on stderr

This module imports the other modules of the view only when they are needed.
"""

import sys
from typing import TYPE_CHECKING

from mpwatch.live_view.tty import find_terminal
from mpwatch.options.log_spec import in_notebook

if TYPE_CHECKING:
    from mpwatch.live_view.live import Display, LiveView


def select_view(progress: bool | None) -> "LiveView | None":
    """Return the view for the option `progress`, or None if there is no view."""
    if not may_show(progress):
        return None
    from mpwatch.live_view.live import LiveView

    return LiveView(lambda: select_display(allow_lines=progress is True), starts_at_once=progress is True)


def may_show(progress: bool | None) -> bool:
    """Return whether a view can be shown with this value of the option `progress`."""
    return progress is not False and (progress is True or in_notebook() or find_terminal() is not None)


def select_display(*, allow_lines: bool) -> "Display | None":
    """Return a display for the notebook or the terminal in which this program runs.

    If neither a notebook nor a terminal can show the view, the result depends on `allow_lines`: True gives a LineDisplay on
    stderr, and False gives None. If rich is not installed, the view in a terminal is a LineDisplay, even if `allow_lines` is
    False.
    """
    if in_notebook():
        from mpwatch.live_view.notebook import NotebookDisplay

        return NotebookDisplay()
    terminal = find_terminal()
    if terminal is not None:
        from mpwatch.live_view.terminal import TerminalDisplay, is_terminal_free

        try:
            from mpwatch.live_view.rich_rows import RichRenderer
        except ImportError:  # rich is not installed
            allow_lines = True
        else:
            if is_terminal_free():
                encoding = getattr(terminal, "encoding", None) or "utf-8"  # a stream object of the user may have none
                return TerminalDisplay(terminal.fileno(), RichRenderer(encoding), encoding)
    if allow_lines and sys.stderr is not None:
        from mpwatch.live_view.line_display import LineDisplay

        return LineDisplay(sys.stderr)
    return None
