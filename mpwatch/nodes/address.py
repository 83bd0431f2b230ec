"""Where the coordinator is: resolve its name, listen there, or connect to it. Every error says what to do."""

import errno
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from mpwatch.errors import LaunchError
from mpwatch.os_support.clock import monotonic

DEFAULT_PORT = 29400
RETRY_SECONDS, CHECK_SECONDS = 0.2, 0.1
CONNECT_SECONDS = 0.5  # short, because the call may be cancelled

T = TypeVar("T")
SocketAddress = tuple[socket.AddressFamily, Any]
"""An address family, and an address in the form that the socket functions need for it."""


class CancelledError(Exception):
    """Another thread has cancelled the wait."""


@dataclass(frozen=True)
class Deadline:
    """When a function stops waiting: at a time of CLOCK_MONOTONIC, or when `cancelled` is set."""

    at: float
    cancelled: threading.Event

    def seconds_left(self, at_most: float) -> float:
        """Return the seconds until the deadline, from 0 to `at_most`. Raises CancelledError."""
        if self.cancelled.is_set():
            raise CancelledError
        return max(0.0, min(at_most, self.at - monotonic()))

    def wait_before_retry(self) -> bool:
        self.cancelled.wait(self.seconds_left(RETRY_SECONDS))
        return self.seconds_left(RETRY_SECONDS) > 0


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Parse `host:port` or `host`, which `Rendezvous` has checked. An IPv6 address is in brackets: `[::1]:29400`."""
        host, colon, port = text.rpartition(":")
        if not colon or text.endswith("]"):
            host, port = text, str(DEFAULT_PORT)
        return cls(host[1:-1] if host.startswith("[") and host.endswith("]") else host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def resolve(endpoint: Endpoint, deadline: Deadline) -> list[SocketAddress]:
    try:
        return _get_addresses(endpoint, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    try:
        return _call_in_thread(lambda: _get_addresses(endpoint, 0), deadline)
    except UnicodeError as error:  # not a valid host name
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error


def _get_addresses(endpoint: Endpoint, flags: int) -> list[SocketAddress]:
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


def _call_in_thread(call: Callable[[], T], deadline: Deadline) -> T:
    """The resolver cannot be interrupted, so a thread of its own waits for it, if need be longer than this function."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  the waiting thread raises it
            future.set_exception(error)

    threading.Thread(target=run, name="mpwatch-resolver", daemon=True).start()
    while not wait([future], CHECK_SECONDS).done:
        if not deadline.seconds_left(1.0):
            raise socket.gaierror(socket.EAI_AGAIN, "the resolver has not answered in time")
    return future.result()


def is_local_address(address: SocketAddress) -> bool:
    """A socket can be bound only to an address of this machine."""
    family, (host, _, *rest) = address
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0, *rest))
        except OSError:
            return False
    return True


def listen(endpoint: Endpoint, local: SocketAddress | None, *, must_serve: bool) -> socket.socket | None:
    """Return a socket that listens at the endpoint, or None if another node here seems to listen there. Raises LaunchError.

    At an address it listens only there. At a name it listens on all addresses, since other machines may resolve the name to
    another one: Debian resolves its own name to a loopback address.
    """
    try:
        if local is not None and local[1][0] == endpoint.host:
            return socket.create_server(local[1], family=local[0], backlog=socket.SOMAXCONN)
        if socket.has_dualstack_ipv6():
            everywhere = ("::", endpoint.port)
            return socket.create_server(everywhere, family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN)
        return socket.create_server(("", endpoint.port), backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(
                f"rendezvous at {endpoint}: this machine cannot listen at port {endpoint.port} ({error.strerror}). Use a"
                " port that it may use, the same one on all nodes"
            ) from error
        if must_serve or local is None:
            raise LaunchError(
                f"rendezvous at {endpoint}: the coordinator is to run in this program, but port {endpoint.port} is taken on"
                " this machine. Perhaps another node of the job runs there with is_host=True. If not, use another port, the"
                " same one on all nodes"
            ) from error
        return None


def connect(endpoint: Endpoint, addresses: list[SocketAddress], deadline: Deadline) -> socket.socket:
    """Return a connected socket. Raises ConnectionError, which says what to do, and CancelledError."""
    problem = ""
    for family, address in addresses:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(deadline.seconds_left(CONNECT_SECONDS) or RETRY_SECONDS)
            connection.connect(address)
        except ConnectionRefusedError:
            problem = (
                "nothing listens there. Check that mpwatch.run has been called on the node that the endpoint names. If that"
                " machine does not know itself by this name, pass is_host=True there"
            )
        except OSError as error:  # includes timeouts
            problem = (
                f"it cannot be reached ({error.strerror or error}). Check that the machine is up, and that no firewall keeps"
                f" the other nodes from port {endpoint.port}"
            )
        else:
            return connection
        connection.close()
    raise ConnectionError(problem)


def is_loopback(address: object) -> bool:
    return isinstance(address, str) and (address.startswith("127.") or address == "::1")
