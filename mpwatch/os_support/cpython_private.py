"""Names of CPython's private API that mpwatch uses. Each comment says what it is for, and what breaks if it goes.

All were seen in CPython 3.11, 3.12 and 3.13. Runs in the watcher and in the ranks.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The module socket replaces these numbers by enums, and their arithmetic runs in Python. If it goes: take the module socket.
c_socket: Any = _socket

# The module signal converts each number and handler to an enum and back. If they go: take signal's own functions.
c_getsignal = _signal.getsignal
c_signal = _signal.signal
