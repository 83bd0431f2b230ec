"""Sends source code that is in no file: notebook cells, and generated code.

Python prints a traceback with the lines that the module `linecache` finds. A rank lacks the cells of the caller's notebook,
and the caller lacks the code that a rank has generated. So the sources are sent with each call and with each exception, and
the receiver adds them to its `linecache` (see os_support/cpython_private.py).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

COMMAND = "<string>"  # Python's file name for `python -c` and for any other code from a string
MAX_SIZE = 1 << 20  # characters of all sources that are sent with one call or one exception


def collect(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        if name != COMMAND and not os.path.exists(name):
            try:
                import linecache  # which itself imports modules on use

                text = "".join(linecache.getlines(name))
            except (ValueError, ImportError, OSError):  # not a valid file name; no module can be imported any more
                continue
            if text and len(text) + sum(map(len, found.values())) <= MAX_SIZE:
                found[name] = text
    return found


def get_ipython_shell() -> Any:
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def cell_name(file: str) -> str:
    """Return IPython's name of the notebook cell with this file name, such as `Cell In[3]`, or "" if there is none."""
    name_of = getattr(
        getattr(get_ipython_shell(), "compile", None), "format_code_name", lambda _: None
    )  # in IPython 8 and newer
    return " ".join(name_of(file) or ())


def add_to_linecache(sources: Mapping[str, str]) -> None:
    """Add these sources to `linecache`, except sources that `linecache` already has."""
    if sources:
        import linecache

        for name, text in sources.items():
            if not linecache.getlines(name):
                # without a modification time, linecache does not look for a file again
                linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
