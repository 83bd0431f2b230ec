"""Whether there is a live view of a run, and where: asked when a call is waited for. Light: what draws is imported later."""

import os
import sys
from typing import TextIO

from .live import Display, LiveView
from .terminal import TerminalDisplay, is_foreground, is_free

__all__ = ["view_for"]


def view_for(progress: bool | None) -> LiveView | None:
    """What the option `progress` asks for. None where nothing will be shown, whatever the ranks report."""
    if progress is False or (progress is None and not _in_notebook() and _terminal() is None):
        return None
    return LiveView(lambda: _display(always=progress is True), is_eager=progress is True)


def _display(*, always: bool) -> Display | None:
    """The best there is."""
    if _in_notebook():
        from .notebook import NotebookDisplay

        return NotebookDisplay()
    terminal = _terminal()
    if terminal is not None and is_free():
        try:
            from .table import Rows
        except ImportError:  # there is no rich
            always = True
        else:
            encoding = terminal.encoding or "utf-8"
            return TerminalDisplay(terminal.fileno(), Rows(encoding), encoding)
    if always and sys.stderr is not None:
        from .plain import PlainDisplay

        return PlainDisplay(sys.stderr)
    return None


def _in_notebook() -> bool:
    """Whether a kernel of Jupyter's runs us, and not IPython in a terminal."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None


def _terminal() -> TextIO | None:
    """The stream that a terminal shows which can be drawn in: it knows how, is ours, and we are in its foreground."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    return next((stream for stream in (sys.stderr, sys.stdout) if _can_be_drawn_in(stream)), None)


def _can_be_drawn_in(stream: TextIO | None) -> bool:
    try:
        fd = stream.fileno() if stream is not None else -1
        return is_foreground(fd) and os.get_terminal_size(fd).columns > 0
    except Exception:  # noqa: BLE001  anybody may have put anything in the place of a stream
        return False
