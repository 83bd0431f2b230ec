"""Answers other programs of this user, which look into the ranks: see running_jobs.py. Runs in the watcher thread."""

import json
import os
import pickle
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from mpwatch.os_support.descriptors import MSG_NOSIGNAL, open_anonymous_file, write_all
from mpwatch.version import __version__
from mpwatch.watcher.processes.selector import Selector
from mpwatch.wire.visits import SUFFIX, check_folder, check_peer, find_folder

READ_SIZE = 4096  # bytes; a question is shorter


class Visitor:
    """A program that looks into the ranks. What it is sent never blocks; if it does not read, it is dropped."""

    def __init__(self, connection: socket.socket, pid: int, selector: Selector[Any]) -> None:
        self.connection, self.pid = connection, pid
        self.on_gone: Callable[[], object] = bool
        self._selector = selector

    def answer(self, answer: object) -> None:
        """Never blocks, however large the answer is."""
        try:
            with open_anonymous_file("mpwatch-answer") as file:
                write_all(file.fileno(), pickle.dumps(answer))
                self.pass_fd(file.fileno())
        except (OSError, MemoryError):
            self.drop()

    def pass_fd(self, fd: int) -> bool:
        """Return False if the visitor has gone."""
        try:
            socket.send_fds(self.connection, [b"!"], [fd], MSG_NOSIGNAL)
        except OSError:
            self.drop()
            return False
        return True

    def drop(self) -> None:
        self._selector.remove(self.connection.fileno())
        self.connection.close()
        on_gone, self.on_gone = self.on_gone, bool
        on_gone()


class Visitors:
    """The socket of one watcher. A question is passed to `answer` with its Visitor, which is answered now or later.

    If there can be no socket, for example because the file system is read-only, the ranks run without.
    """

    def __init__(self, selector: Selector[Any], answer: Callable[[Mapping[str, Any], Visitor], object]) -> None:
        self._selector, self._answer = selector, answer
        self._listener: socket.socket | None = None
        self._visitors: list[Visitor] = []
        self._path = os.path.join(find_folder(), f"{os.getpid()}-{os.urandom(4).hex()}-{__version__}{SUFFIX}")

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._listen()
        return self

    def _listen(self) -> None:
        folder = os.path.dirname(self._path)
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        check_folder(folder)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(new := self._path.removesuffix(SUFFIX))
            listener.listen()
            os.rename(new, self._path)  # not before: a visitor takes a socket at which nobody listens for a dead one
            listener.setblocking(False)
            self._selector.add(listener.fileno(), self._accept)
        except BaseException:
            listener.close()
            raise
        self._listener = listener

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for visitor in self._visitors:
            visitor.drop()
        self._close_listener()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._selector.remove(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with suppress(OSError):
                os.unlink(self._path)

    def _accept(self) -> tuple[()]:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the visitor has gone
            return ()
        except OSError:  # no descriptors are left: if it stayed open, the loop would spin
            self._close_listener()
            return ()
        self._visitors = [other for other in self._visitors if other.connection.fileno() != -1]
        try:
            visitor = Visitor(connection, check_peer(connection), self._selector)
            connection.setblocking(False)
            self._selector.add(connection.fileno(), partial(self._read, visitor))
            self._visitors.append(visitor)
        except OSError:
            connection.close()
        return ()

    def _read(self, visitor: Visitor) -> tuple[()]:
        try:
            question = json.loads(visitor.connection.recv(READ_SIZE))
        except BlockingIOError:
            return ()
        except (OSError, ValueError, RecursionError):
            question = None
        if isinstance(question, dict):
            self._answer(question, visitor)
        else:  # it has gone, or sends anything
            visitor.drop()
        return ()
