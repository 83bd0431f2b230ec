"""Send this process a signal at one line of mpwatch, for tests that try one line after the other."""

import os
import signal
import sys


class SignalAtLine:
    """In a `with` block: raise a signal at the n-th line that this thread executes in some code.

    Args:
        signum: the signal.
        name: the qualified name of a function of mpwatch, or the name of a file.
        n: counts from 1. `was_sent` is False if there are fewer lines.
    """

    def __init__(self, signum, name, n):
        self._signum = signum
        self._name = name
        self._lines_left = n
        self.was_sent = False

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, _):
        code = frame.f_code
        is_meant = "mpwatch" in code.co_filename and self._name in (code.co_qualname, os.path.basename(code.co_filename))
        if self.was_sent or not is_meant:
            return None
        if event == "line":
            self._lines_left -= 1
            if self._lines_left == 0:
                self.was_sent = True
                sys.settrace(None)
                signal.raise_signal(self._signum)
        return self._trace
