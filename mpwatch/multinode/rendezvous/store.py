"""A connection to a store of torch's (`TCPStore`), which ends when the network does, and can be cut by us.

Torch's client waits for an answer as long as it takes, in C++: on a network that has gone silent for ever. Here the kernel
ends a silent connection, whoever closes the engine can shut it down, and what torch raises then is a StoreLostError.
"""

import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from mpwatch.multinode.rendezvous.cancellable_wait import Deadline, wait_for
from mpwatch.multinode.rendezvous.endpoint import Endpoint
from mpwatch.multinode.rendezvous.errors import StoreLostError
from mpwatch.os_support.descriptors import end_silent_connection

MAX_VALUE = 8 << 20  # bytes; torch's server hangs up on who sends more
MAKE_SECONDS = 30.0  # for a client to connect: whoever is there has just answered, but a resolver may be slow
CLOSED = "this node has closed it"
FOLDERS = ("/proc/self/fd", "/dev/fd")

P = ParamSpec("P")
T = TypeVar("T")

FAMILIES = (socket.AF_INET, socket.AF_INET6)
# Torch makes its connection and does not tell which descriptor it has: one at a time can be found.
_making = threading.Lock()


class StoreConnection:
    """One client of a store, for all threads of an engine.

    Args:
        store: torch's. With the last reference to it goes the server too, if it serves the store.
        sockets: duplicates of the sockets that it is connected by, of which this is the owner; none if nobody knows them.
        where: the endpoint, or whatever it is to be called, for errors.
        errors: what a call raises when the store cannot be reached, beside torch's own errors.
    """

    def __init__(
        self, store: Store, sockets: list[socket.socket], where: Endpoint | str, errors: tuple[type[Exception], ...] = ()
    ) -> None:
        self._store: Store | None = store
        self._sockets = sockets
        self._where = where
        self._errors: tuple[type[Exception], ...] = (DistError, RendezvousConnectionError, *errors)
        self._lost: str | None = None

    @property
    def lost(self) -> bool:
        """Whether a call has found that the store cannot be reached."""
        return self._lost is not None

    def borrowed(self) -> Store:
        """The store, for one call: who keeps it, if in a traceback, keeps its server. Raises StoreLostError when closed."""
        if self._store is None:
            raise self._error()
        return self._store

    def guarded(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a call of the store returns. Raises StoreLostError when it cannot be reached, from then on at once."""
        # Torch writes pages to stderr when it finds that somebody has hung up, so it is not asked then.
        if self._lost is None and (trouble := self._hung_up()):
            self._lost = trouble
        if self._lost is not None:
            raise self._error()
        try:
            return call(*args, **kwargs)
        except (DistStoreError, LookupError) as error:  # a user's own store may raise LookupError
            raise StoreLostError(f"the store at {self._where} does not hold what it should: {_first_line(error)}") from error
        except self._errors as error:
            self._lost = _first_line(error.__cause__ or error)
            raise self._error() from error

    def _error(self) -> StoreLostError:
        return StoreLostError(
            f"the store at {self._where} cannot be reached any more ({self._lost}): the node that serves it has ended, or"
            " the network in between is cut"
        )

    def _hung_up(self) -> str:
        """Why nothing can come any more, if so: without taking anything away from torch, and without waiting."""
        for connection in self._sockets:
            try:
                if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return "it has hung up"
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                return str(error.strerror)
        return ""

    def cut(self) -> None:
        """Have all calls fail, those in progress on other threads among them."""
        for connection in self._sockets:
            with suppress(OSError):  # it is not connected any more
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the store: with it goes the server, if it serves it."""
        self.cut()
        self.give_back()

    def give_back(self) -> None:
        """Let go of the store, which is somebody else's and goes on."""
        self._store, self._lost = None, self._lost or CLOSED
        while self._sockets:
            self._sockets.pop().close()


class PrefixedStore(Store):
    """What is in the store under a prefix. Its calls raise StoreLostError, and not torch's errors.

    It keeps no server alive: once the connection has been closed it is of no use, whoever may hold it still.
    """

    def __init__(self, connection: StoreConnection, prefix: str) -> None:
        super().__init__()
        self._connection = connection
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        """Write it, for all to see. Raises ValueError if it is too long."""
        if len(value) > MAX_VALUE:
            raise ValueError(f"the store takes {MAX_VALUE} bytes at once, not {len(value)}")
        self._call(PrefixStore.set, key, cast("str", value))  # torch's stubs say nothing of bytes

    def get(self, key: str) -> bytes:
        """What has been written. Waits for it as long as a silent store is waited for: ask `check` first."""
        return self._call(PrefixStore.get, key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins with 0. Returns the sum."""
        return self._call(PrefixStore.add, key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write it if `expected` is there, or nothing and `expected` is empty. Returns what is there then."""
        return self._call(PrefixStore.compare_set, key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        """Whether all of these have been written."""
        return self._call(PrefixStore.check, keys)

    def delete_key(self, key: str) -> bool:
        """Forget it. Whether there was such a key."""
        return self._call(PrefixStore.delete_key, key)

    def _call(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        def call() -> T:
            return method(PrefixStore(self._prefix, self._connection.borrowed()), *args, **kwargs)

        return self._connection.guarded(call)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def tcp_store(
    endpoint: Endpoint, host: str, limit: Deadline, silence: float, listener: socket.socket | None = None
) -> StoreConnection:
    """Connect to the store at the endpoint; and serve it, if there is a listener, which is torch's from then on.

    It may take its time, since torch asks a resolver for the name of whom it connects to, and does not say so.

    Args:
        endpoint: for errors.
        host: the address by which it is reached: nothing is asked of a resolver any more.
        limit: when to give up.
        silence: seconds after which a silent connection is a lost one.
        listener: who listens at the endpoint already.

    Raises StoreLostError if the store is not to be had after all, CancelledError, and OSError.
    """
    before: list[set[tuple[int, int]]] = []

    def make() -> StoreConnection:
        with _making:
            before.append(_sockets())
            store = _made(host, endpoint.port, listener)
            sockets = _connected(_sockets() - before[0], endpoint.port)
        store.set_timeout(timedelta(seconds=silence))
        for connection in sockets:
            end_silent_connection(connection, silence)
        return StoreConnection(store, sockets, endpoint)

    def look_after(late: bool) -> None:
        """It waits for an answer until its connection ends, so that has to end."""
        for connection in _connected(_sockets() - before[0], endpoint.port) if before else ():
            with suppress(OSError), connection:
                end_silent_connection(connection, silence)
                if late:
                    connection.shutdown(socket.SHUT_RDWR)

    try:
        return wait_for(make, limit, "mpwatch-connect", undo=StoreConnection.close, meanwhile=look_after)
    except DistError as error:
        raise StoreLostError(f"the store at {endpoint} has hung up: {_first_line(error)}") from error
    except TimeoutError as error:
        raise StoreLostError(f"the store at {endpoint} has not answered") from error


def _made(host: str, port: int, listener: socket.socket | None) -> TCPStore:
    to_it: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=MAKE_SECONDS)}
    if listener is None:
        return TCPStore(host, port, **to_it)
    to_it |= {"is_master": True, "master_listen_fd": listener.detach()}
    try:
        return TCPStore(host, port, **to_it)
    except NotImplementedError:  # torch 2.4: its new server cannot be given a listener, the old one can
        return TCPStore(host, port, **to_it, use_libuv=False)


def borrowed(store: Store, where: str, silence: float) -> tuple[StoreConnection, str, bool]:
    """A connection that somebody else has made.

    Args:
        store: torch's, or anything that does what its stores do.
        where: what to call it, for errors, unless it says where it is.
        silence: seconds after which a silent connection is a lost one, where it is known to be one of TCP.

    Returns:
        It; the name or address by which others reach this machine, "" if that cannot be seen from here; and whether this
        process serves the store.
    """
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if not isinstance(base, TCPStore):
        return StoreConnection(store, [], where, (Exception,)), "", False  # nobody knows what its calls raise
    there = _sockets()
    sockets = _connected(there, base.port)
    for connection in sockets:
        end_silent_connection(connection, silence)
    serves = _listens(there, base.port)
    local = base.host if serves or not sockets else str(sockets[0].getsockname()[0])
    return StoreConnection(store, sockets, Endpoint(base.host, base.port), (Exception,)), local, serves


def _sockets() -> set[tuple[int, int]]:
    """Those that are open, by descriptor and inode, since descriptors are used again; none where nobody lists them."""
    found = set()
    for folder in FOLDERS:
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            with suppress(OSError):  # the one of the listing, or closed since
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found


def _connected(candidates: set[tuple[int, int]], port: int) -> list[socket.socket]:
    """Duplicates of those of them whose other end is that port."""
    found = []
    for fd, _ in candidates:
        with suppress(OSError):
            connection = _duplicate(fd)
            try:
                theirs = connection.family in FAMILIES and connection.getpeername()[1] == port
            except OSError:
                theirs = False
            if theirs:
                found.append(connection)
            else:
                connection.close()
    return found


def _listens(candidates: set[tuple[int, int]], port: int) -> bool:
    """Whether one of them is where others connect to that port."""
    for fd, _ in candidates:
        with suppress(OSError), _duplicate(fd) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and listener.getsockname()[1] == port:
                return True
    return False


def _duplicate(fd: int) -> socket.socket:
    """Raises OSError if it is no socket any more: it may have been closed since it was one, and be something else by now."""
    duplicate = os.dup(fd)
    try:
        blocking = os.get_blocking(duplicate)
        found = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    os.set_blocking(duplicate, blocking)  # a default timeout of sockets would have changed that, for torch too
    return found
