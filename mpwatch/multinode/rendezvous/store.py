"""Connections to torch's store (`TCPStore`). If the store does not answer, the connection is closed.

torch's C++ client waits for an answer without limit, even if the network does not work any more. This module sets options
of the connection's socket, so that the kernel ends the connection if no answer comes. StoreLostError replaces torch's
errors.
"""

import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from weakref import WeakValueDictionary

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from mpwatch.multinode.rendezvous.cancellable_wait import Deadline, call_with_deadline
from mpwatch.multinode.rendezvous.endpoint import Endpoint
from mpwatch.multinode.rendezvous.errors import StoreLostError
from mpwatch.os_support.descriptors import end_connection_after_silence

MAX_VALUE_BYTES = 8 << 20  # torch's server closes the connection of a client that sends more
CONNECT_SECONDS = 5.0  # for torch's client to connect to a store that has just answered. torch may try twice
CLOSED_BY_THIS_NODE = "this node has closed the connection"
FD_FOLDERS = ("/proc/self/fd", "/dev/fd")

P = ParamSpec("P")
T = TypeVar("T")

IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# torch does not show the descriptor of its connection. mpwatch can find the descriptor only while no other thread connects
# to the same port. Connects to other ports do not wait, because torch tries for seconds if a store has just ended.
_connect_locks: "WeakValueDictionary[int, threading.Lock]" = WeakValueDictionary()
_connect_locks_guard = threading.Lock()


class StoreConnection:
    """The connection of this process to a store. All threads of a RendezvousClient share one StoreConnection.

    Args:
        store: torch's store. If this process serves the store, the server ends when no reference to the store is left.
        sockets: duplicates of the client's sockets, which this object closes. The list is empty if they are not known.
        endpoint: the endpoint of the store, for error messages.
    """

    def __init__(self, store: Store, sockets: list[socket.socket], endpoint: Endpoint) -> None:
        self._store: Store | None = store
        self._sockets = sockets
        self._endpoint = endpoint
        self._lost_reason: str | None = None

    def get_store(self) -> Store:
        """Return torch's store. Raises StoreLostError if the connection is closed.

        Do not save the returned store in an attribute. Any reference to the store keeps its server alive, even a reference
        in a traceback.
        """
        if self._store is None:
            raise self._make_error()
        return self._store

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`, which uses the store, and return its result.

        Raises StoreLostError if an expected entry is missing or the store cannot be reached. After the connection is lost,
        each call raises StoreLostError at once.
        """
        # torch prints pages to stderr if it finds a closed connection, so it is not called in this case.
        if self._lost_reason is None and (reason := self._find_disconnect()):
            self._lost_reason = reason
        if self._lost_reason is not None:
            raise self._make_error()
        try:
            return function(*args, **kwargs)
        except DistStoreError as error:
            raise StoreLostError(
                f"the store at {self._endpoint} does not hold an expected entry: {_first_line(error)}"
            ) from error
        except (DistError, RendezvousConnectionError) as error:
            self._lost_reason = _first_line(error.__cause__ or error)
            raise self._make_error() from error

    def _make_error(self) -> StoreLostError:
        return StoreLostError(
            f"the store at {self._endpoint} cannot be reached any more ({self._lost_reason}): the node that serves it has"
            " ended, or the network to it is cut"
        )

    def _find_disconnect(self) -> str:
        """Return the reason why the connection to the store has ended, or "" if it has not ended.

        This method does not wait, and leaves all received data in the socket for torch.
        """
        for connection in self._sockets:
            try:
                if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return "it has closed the connection"
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                return str(error.strerror)
        return ""

    def shut_down(self) -> None:
        """Shut down the connection, so that all calls fail, including calls that are in progress on other threads."""
        for connection in self._sockets:
            with suppress(OSError):  # it is not connected any more
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and release the store. If this process runs the store's server, the server ends."""
        self.shut_down()
        self._store, self._lost_reason = None, self._lost_reason or CLOSED_BY_THIS_NODE
        while self._sockets:
            self._sockets.pop().close()


class PrefixedStore(Store):
    """A store that adds `prefix` to each key, and then uses the store of the StoreConnection.

    The methods raise StoreLostError instead of torch's errors. After the StoreConnection is closed, each method raises
    StoreLostError. A PrefixedStore does not keep the store's server alive.
    """

    def __init__(self, connection: StoreConnection, prefix: str) -> None:
        super().__init__()
        self._connection = connection
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value. Raises ValueError if the value is too long."""
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"the store takes at most {MAX_VALUE_BYTES} bytes in one value, not {len(value)}")
        self._call(PrefixStore.set, key, cast("str", value))  # torch's stubs do not mention bytes

    def get(self, key: str) -> bytes:
        """Read a value. Call `check` first. If the key is missing, `get` blocks until the timeout of the connection."""
        return self._call(PrefixStore.get, key)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a counter, and return the new value. A counter starts at zero."""
        return self._call(PrefixStore.add, key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` if the present value is `expected`. Return the value that the key has after the call.

        To write a key that has no value yet, pass an empty `expected`.
        """
        return self._call(PrefixStore.compare_set, key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys exist."""
        return self._call(PrefixStore.check, keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key. Return whether it existed."""
        return self._call(PrefixStore.delete_key, key)

    def _call(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        def call() -> T:
            return method(PrefixStore(self._prefix, self._connection.get_store()), *args, **kwargs)

        return self._connection.call(call)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def open_tcp_store(
    endpoint: Endpoint,
    host: str,
    deadline: Deadline,
    silence_timeout: float,
    listener: socket.socket | None = None,
) -> StoreConnection:
    """Connect to the store at the endpoint. If `listener` is passed, this process also serves the store.

    This function may take long, because torch also looks up the name of the store's machine.

    Args:
        endpoint: the endpoint with the port. It is also used for error messages.
        host: the address of the store, which needs no name resolution.
        deadline: the time at which the tries end.
        silence_timeout: seconds after which a connection without an answer is lost.
        listener: a socket that listens at the endpoint. From now on torch owns it.

    Raises:
        StoreLostError: the store cannot be reached after all.
        CancelledError: the call was cancelled.
        OSError: the sockets of this process cannot be read.
    """
    sockets_before: list[set[tuple[int, int]]] = []

    def connect() -> StoreConnection:
        with _connect_locks_guard:
            connect_lock = _connect_locks.setdefault(endpoint.port, threading.Lock())
        with connect_lock:
            sockets_before.append(_list_sockets())
            store = _make_tcp_store(host, endpoint.port, listener)
            sockets = _find_connected(_list_sockets() - sockets_before[0], endpoint.port)
        store.set_timeout(timedelta(seconds=silence_timeout))
        for connection in sockets:
            end_connection_after_silence(connection, silence_timeout)
        return StoreConnection(store, sockets, endpoint)

    def end_stuck_connections(is_late: bool) -> None:
        """Let the kernel end torch's new connection if no answer comes for `silence_timeout` seconds.

        If `is_late` is True, end the connection now.
        """
        for connection in _find_connected(_list_sockets() - sockets_before[0], endpoint.port) if sockets_before else ():
            with suppress(OSError), connection:
                end_connection_after_silence(connection, silence_timeout)
                if is_late:
                    connection.shutdown(socket.SHUT_RDWR)

    try:
        return call_with_deadline(
            connect, deadline, "mpwatch-connect", undo=StoreConnection.close, on_check=end_stuck_connections
        )
    except DistError as error:
        raise StoreLostError(f"this node cannot connect to the store at {endpoint}: {_first_line(error)}") from error
    except TimeoutError as error:
        raise StoreLostError(f"the store at {endpoint} has not answered") from error


def _make_tcp_store(host: str, port: int, listener: socket.socket | None) -> TCPStore:
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=CONNECT_SECONDS)}
    if listener is None:
        return TCPStore(host, port, **options)
    options |= {"is_master": True, "master_listen_fd": listener.detach()}
    try:
        return TCPStore(host, port, **options)
    except NotImplementedError:  # torch 2.4: only its old server accepts a listener
        return TCPStore(host, port, **options, use_libuv=False)


def _list_sockets() -> set[tuple[int, int]]:
    """Return a set with the descriptor and the inode of each open socket of this process.

    A descriptor alone does not identify a socket, because the system reuses the number of a closed descriptor.
    """
    found = set()
    for folder in FD_FOLDERS:
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            with suppress(OSError):  # the descriptor of the listing itself, or one that was closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found


def _find_connected(candidates: set[tuple[int, int]], port: int) -> list[socket.socket]:
    """Return duplicates of the sockets that are connected to this port."""
    found = []
    for fd, _ in candidates:
        with suppress(OSError):
            connection = _duplicate_socket(fd)
            try:
                is_connected = connection.family in IP_FAMILIES and connection.getpeername()[1] == port
            except OSError:
                is_connected = False
            if is_connected:
                found.append(connection)
            else:
                connection.close()
    return found


def _duplicate_socket(fd: int) -> socket.socket:
    """Duplicate a socket. Raises OSError if the descriptor is not a socket any more.

    If another thread has closed the socket, the descriptor may already belong to another file.
    """
    duplicate = os.dup(fd)
    try:
        is_blocking = os.get_blocking(duplicate)
        found = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    os.set_blocking(duplicate, is_blocking)  # a default timeout of sockets would have changed that, for torch's socket too
    return found
