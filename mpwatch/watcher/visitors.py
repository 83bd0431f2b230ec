"""Answers other programs of this user, which look into the ranks: see running_jobs.py. Runs in the watcher thread."""

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Self

from mpwatch.version import __version__
from mpwatch.watcher.processes.selector import Selector
from mpwatch.wire.visits import SUFFIX, check_folder, find_folder, send_answer

READ_SIZE = 4096  # bytes; a question is shorter
ATTEMPTS = 3
BACKLOG = 16  # visitors that wait to be accepted
_numbers = count(1)

Receive = Callable[[object], object]


class Visitors:
    """The socket of one watcher. A question is passed to `answer`, which calls its second argument once, now or later.

    If there can be no socket, for example because the file system is read-only, the ranks run without.
    """

    def __init__(self, selector: Selector[Any], answer: Callable[[Mapping[str, Any], Receive], object]) -> None:
        self._selector, self._answer = selector, answer
        self._listener: socket.socket | None = None
        self._visitors: set[socket.socket] = set()
        self._folder = find_folder()
        self._path = os.path.join(self._folder, f"{os.getpid()}-{next(_numbers)}-{__version__}{SUFFIX}")

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._listen()
        return self

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            self._bind(listener)
            listener.listen(BACKLOG)
            listener.setblocking(False)
            self._selector.add(listener.fileno(), self._accept)
        except BaseException:
            listener.close()
            raise
        self._listener = listener

    def _bind(self, listener: socket.socket) -> None:
        for _ in range(ATTEMPTS):
            with suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
            with suppress(FileNotFoundError):  # another watcher has removed the empty folder just now
                check_folder(self._folder)
                listener.bind(self._path)
                return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for visitor in list(self._visitors):
            self._drop(visitor)
        if self._listener is not None:
            self._selector.remove(self._listener.fileno())
            self._listener.close()
            with suppress(OSError):
                os.unlink(self._path)
                os.rmdir(self._folder)  # unless others use it

    def _accept(self) -> tuple[()]:
        assert self._listener is not None
        with suppress(OSError):  # no descriptors are left, or the visitor has gone
            visitor, _ = self._listener.accept()
            visitor.setblocking(False)
            self._visitors.add(visitor)
            self._selector.add(visitor.fileno(), partial(self._read, visitor))
        return ()

    def _read(self, visitor: socket.socket) -> tuple[()]:
        try:
            questions = [json.loads(line) for line in visitor.recv(READ_SIZE).splitlines()]
        except BlockingIOError:
            return ()
        except (OSError, ValueError):
            questions = []
        if not questions or not all(isinstance(question, dict) for question in questions):
            self._drop(visitor)
            return ()
        for question in questions:
            self._answer(question, partial(self._send, visitor))
        return ()

    def _send(self, visitor: socket.socket, answer: object) -> None:
        if visitor in self._visitors:
            try:
                send_answer(visitor, answer)
            except OSError:
                self._drop(visitor)

    def _drop(self, visitor: socket.socket) -> None:
        self._visitors.discard(visitor)
        self._selector.remove(visitor.fileno())
        visitor.close()
