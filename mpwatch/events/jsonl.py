"""`JsonLines` is an observer that appends each event to a file as a line of JSON."""

import os

from mpwatch.events.types import Event


class JsonLines:
    """Append each event to a file as one line, which contains `Event.to_dict()` as strict JSON in ASCII.

    Pass an instance of JsonLines as `on_event` to `mpwatch.run` or `WorkerGroup`. Several runs and processes can append to
    one file at the same time, because each line is appended with a single write. JsonLines does not keep the file open
    between events.

    Args:
        path: the file. It is created if it is missing, but its folder must exist.

    Raises OSError if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)  # a later chdir() changes nothing
        with open(self._path, "ab"):
            pass

    def __repr__(self) -> str:
        return f"JsonLines({self._path!r})"

    def __call__(self, event: Event) -> None:
        import json

        line = json.dumps(event.to_dict(), allow_nan=False)
        with open(self._path, "ab", buffering=0) as file:
            file.write(f"{line}\n".encode())
