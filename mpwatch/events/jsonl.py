"""`JsonLines` is an observer that appends each event to a file as a line of JSON."""

import errno
import os
from io import FileIO

from mpwatch.events.types import Event
from mpwatch.os_support.descriptors import write_all

# JSON may contain these characters, but str.splitlines() would split the line at each of them.
LINE_SEPARATORS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


class JsonLines:
    """Append each event to a file as one line, which contains `Event.to_dict()` as strict JSON in UTF-8.

    Pass an instance of JsonLines as `on_event` to `mpwatch.run` or `WorkerGroup`. Several runs and processes can append to
    one file at the same time, because each line is appended with a single write. JsonLines does not keep the file open
    between events.

    Args:
        path: the file. It is created if it is missing, but its folder must exist.

    Raises OSError if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)  # a later chdir() changes nothing
        folder = os.path.dirname(self._path)
        if not os.path.isdir(folder):
            raise FileNotFoundError(errno.ENOENT, "The folder for the file of events does not exist", folder)
        with FileIO(self._path, "ab"):
            pass

    def __repr__(self) -> str:
        return f"JsonLines({self._path!r})"

    def __call__(self, event: Event) -> None:
        import json

        line = json.dumps(event.to_dict(), ensure_ascii=False, allow_nan=False).translate(LINE_SEPARATORS)
        with FileIO(self._path, "ab") as file:
            write_all(file.fileno(), f"{line}\n".encode())
