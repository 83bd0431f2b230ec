"""`JsonLines`: an observer that appends the events of runs to a file, a JSON object a line. Runs in the caller's thread."""

import errno
import os
from io import FileIO

from mpwatch.events.types import Event
from mpwatch.os_support.descriptors import write_all

# What JSON may hold as it is, but str.splitlines() takes for the end of a line.
NOT_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


class JsonLines:
    """Appends each event to this file, as `Event.to_dict()` has it: UTF-8, strictly JSON, a line for each.

    For the `on_event` of `mpwatch.run` and `WorkerGroup`. Several runs may append to one file, at once and from several
    processes: each line is one write, at the end of the file as it is then. Nothing is held open in between. The file is
    made at once if there is none; raises OSError if it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)  # the program may go to another folder
        folder = os.path.dirname(self._path)
        if not os.path.isdir(folder):
            raise FileNotFoundError(errno.ENOENT, "There is no such folder to write events in", folder)
        with FileIO(self._path, "ab"):
            pass

    def __repr__(self) -> str:
        return f"JsonLines({self._path!r})"

    def __call__(self, event: Event) -> None:
        """Append this event. Raises OSError."""
        import json

        line = json.dumps(event.to_dict(), ensure_ascii=False, allow_nan=False).translate(NOT_ENDS)
        with FileIO(self._path, "ab") as file:  # closes itself, should an exception be thrown at us
            write_all(file.fileno(), f"{line}\n".encode())
