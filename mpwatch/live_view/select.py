"""Whether there is a live view of a call, and where. What it is made of is imported when there is one."""

import sys
from typing import TYPE_CHECKING

from mpwatch.live_view.tty import our_terminal
from mpwatch.options.log_spec import in_notebook

if TYPE_CHECKING:
    from mpwatch.live_view.live import Display, LiveView


def view_for(progress: bool | None) -> "LiveView | None":
    """What the option `progress` asks for. None where nothing will be shown, whatever the ranks report."""
    if progress is False or (progress is None and not in_notebook() and our_terminal() is None):
        return None
    from mpwatch.live_view.live import LiveView

    return LiveView(lambda: _display(always=progress is True), is_eager=progress is True)


def _display(*, always: bool) -> "Display | None":
    """The best there is."""
    if in_notebook():
        from mpwatch.live_view.notebook import NotebookDisplay

        return NotebookDisplay()
    terminal = our_terminal()
    if terminal is not None:
        from mpwatch.live_view.terminal import TerminalDisplay, is_free

        try:
            from mpwatch.live_view.rich_rows import RichRenderer
        except ImportError:  # there is no rich
            always = True
        else:
            if is_free():
                encoding = getattr(terminal, "encoding", None) or "utf-8"  # somebody's own stream may have none
                return TerminalDisplay(terminal.fileno(), RichRenderer(encoding), encoding)
    if always and sys.stderr is not None:
        from mpwatch.live_view.line_display import LineDisplay

        return LineDisplay(sys.stderr)
    return None
