"""Where the coordinator is: resolve its name, and listen there or connect to it. Every error says what to do."""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mpwatch.errors import LaunchError
from mpwatch.wire.resource_errors import with_remedy

DEFAULT_PORT = 29400
CONNECT_SECONDS = 0.5  # short, because the next try may find the machine up

T = TypeVar("T")
SocketAddress = tuple[socket.AddressFamily, Any]
"""An address family, and an address in the form that the socket functions need for it."""


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


async def resolve(endpoint: Endpoint, until: float) -> list[SocketAddress]:
    """Raises ConnectionError, also if the name service has not answered in time."""
    try:
        async with asyncio.timeout_at(until):
            found = await _call_in_thread(partial(socket.getaddrinfo, endpoint.host, endpoint.port, type=socket.SOCK_STREAM))
    except (socket.gaierror, UnicodeError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer in time"
        raise ConnectionError(
            f"the name {endpoint.host!r} cannot be resolved ({reason}). Check its spelling and this machine's name service,"
            " or give the address instead"
        ) from error
    return [(family, address) for family, _, _, _, address in found]


async def _call_in_thread(call: Callable[[], T]) -> T:
    """The resolver cannot be interrupted, so a thread of its own waits for it, if need be longer than this function."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  the event loop raises it
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="mpwatch-resolver", daemon=True).start()
    except RuntimeError as error:
        raise LaunchError(with_remedy("the thread that resolves a name cannot be started", error)) from error
    return await asyncio.wrap_future(future)


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
            return socket.create_server(local[1], family=local[0])
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", endpoint.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", endpoint.port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE and local is not None and not must_serve:
            return None
        raise LaunchError(
            f"rendezvous at {endpoint}: the coordinator is to run in this program, but port {endpoint.port} is taken on this"
            f" machine, or cannot be used ({error.strerror}). Perhaps another node of the job runs here with is_host=True."
            " If not, use another port, the same one on all nodes"
        ) from error


async def connect(endpoint: Endpoint, addresses: list[SocketAddress]) -> socket.socket:
    """Return a connected socket. Raises ConnectionError, which says what to do."""
    problem = ""
    for family, address in addresses:
        with ExitStack() as stack:
            connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            connection.setblocking(False)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await asyncio.get_running_loop().sock_connect(connection, address)
            except ConnectionRefusedError:
                problem = (
                    "nothing listens there. Check that mpwatch.run has been called on the node that the endpoint names. If"
                    " that machine does not know itself by this name, pass is_host=True there"
                )
            except OSError as error:  # includes timeouts
                problem = (
                    f"it cannot be reached ({error.strerror or 'timed out'}). Check that the machine is up, and that no"
                    f" firewall keeps the other nodes from port {endpoint.port}"
                )
            else:
                stack.pop_all()
                return connection
    raise ConnectionError(problem)


def is_loopback(address: object) -> bool:
    return isinstance(address, str) and (address.startswith("127.") or address == "::1")
