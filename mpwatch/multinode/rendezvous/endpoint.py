"""Find the store with plain sockets, before torch connects to the store.

If torch's client cannot connect, its error text consists of pages of C++ frames. If another program listens at the endpoint,
torch's client waits without limit. Before torch connects, `resolve` looks up the addresses of the endpoint, and `find_store`
searches these addresses for a store. `resolve` and `find_store` end soon after their deadline. This module does not import
torch.
"""

import errno
import socket
import struct
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from mpwatch.errors import LaunchError
from mpwatch.multinode.rendezvous.cancellable_wait import RETRY_SECONDS, Deadline, call_with_deadline
from mpwatch.os_support.clock import monotonic

TRY_SECONDS = 0.5  # to connect, and again to get an answer. It is short, because the call may be cancelled
ANSWER_SECONDS = 2.0  # a store on this machine has this time to answer. Otherwise the listener counts as another program
# torch's clients begin with this validation request. Then this request asks for the number of keys, which stores of all
# versions answer. Stores of torch 2.4 do not answer a ping.
PROBE_REQUEST = struct.pack("=BIB", 0, 0x3C85F7CE, 7)
KEY_COUNT = struct.Struct("=q")
MAX_KEY_COUNT = 1 << 32  # a larger number is text that another program sent

SocketAddress = tuple[socket.AddressFamily, Any]
"""An address family, and an address in the form that the socket functions need for this family."""


@dataclass(frozen=True)
class Endpoint:
    """Host and port of the store."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_port: int) -> "Endpoint":
        """Parse `host:port` or `host`. An IPv6 address must be in brackets, for example `[::1]:29400`.

        This method does not check the form of `text`, because `Rendezvous` checks it.
        """
        host, colon, port = text.rpartition(":")
        if not colon or text.endswith("]"):
            host, port = text, str(default_port)
        return cls(host[1:-1] if host.startswith("[") and host.endswith("]") else host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class StoreAddress:
    """The address at which a store has answered, and the local address of the connection to this store."""

    host: str
    local_host: str


class ProbeResult(Enum):
    """The result of a test request to the program that listens at the endpoint."""

    STORE = auto()
    NO_ANSWER = auto()
    """It has sent nothing, or closed the connection. It may be a stopped store, a proxy, or another program."""
    NOT_A_STORE = auto()
    """It has sent an answer that no store sends."""


def resolve(endpoint: Endpoint, deadline: Deadline) -> list[SocketAddress]:
    """Resolve the name of the endpoint, and return its addresses.

    Raises:
        socket.gaierror: the name cannot be resolved, or the deadline has passed.
        CancelledError: the call was cancelled.
    """
    try:
        return _get_addresses(endpoint, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    try:
        return call_with_deadline(lambda: _get_addresses(endpoint, 0), deadline, "mpwatch-resolver")
    except TimeoutError:
        raise socket.gaierror(socket.EAI_AGAIN, "the resolver has not answered in time") from None
    except UnicodeError as error:  # not a valid host name
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error


def _get_addresses(endpoint: Endpoint, flags: int) -> list[SocketAddress]:
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


def is_local_address(address: SocketAddress) -> bool:
    """Return whether this address belongs to this machine. A socket can be bound only to an address of this machine."""
    family, (host, _, *rest) = address
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0, *rest))
        except OSError:
            return False
    return True


def listen(endpoint: Endpoint, local_address: SocketAddress | None) -> socket.socket:
    """Return a socket that listens at the endpoint.

    Raises OSError if the socket cannot listen. If the port is taken, the exception's attribute `errno` is EADDRINUSE.

    If the endpoint is an address of this machine, the socket listens only on this address. If the endpoint is a name, the
    socket listens on all addresses of this machine, because other machines can resolve the name to another address than this
    machine. For example, a Debian machine resolves its own name to a loopback address, which other machines cannot use.
    """
    if local_address and local_address[1][0] == endpoint.host:
        return socket.create_server(local_address[1], family=local_address[0], backlog=socket.SOMAXCONN)
    if socket.has_dualstack_ipv6():
        any_address = ("::", endpoint.port)
        return socket.create_server(any_address, family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN)
    return socket.create_server(("", endpoint.port), backlog=socket.SOMAXCONN)


def find_store(endpoint: Endpoint, addresses: list[SocketAddress], deadline: Deadline) -> StoreAddress | str:
    """Return the first address at which a store answers, or an error text if no store answers.

    Raises:
        LaunchError: another program listens there.
        CancelledError: the call was cancelled.
    """
    problem = ""
    for family, address in addresses:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(deadline.seconds_left(TRY_SECONDS) or RETRY_SECONDS)
                connection.connect(address)
                answer = probe_store(connection, deadline.seconds_left(TRY_SECONDS) or RETRY_SECONDS)
                if answer is ProbeResult.STORE:
                    return StoreAddress(address[0], connection.getsockname()[0])
                problem = (
                    "what listens there does not answer as torch's store. Check on that machine whether another program has"
                    " taken the port"
                )
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
            if answer is ProbeResult.NOT_A_STORE:
                raise make_port_taken_error(endpoint)
    return problem


def make_port_taken_error(endpoint: Endpoint) -> LaunchError:
    return LaunchError(
        f"rendezvous at {endpoint}: port {endpoint.port} is taken by a program that does not answer as torch's store. Use"
        " another port, the same one on all nodes"
    )


def probe_store(connection: socket.socket, seconds: float) -> ProbeResult:
    """Send a test request, and find out from the answer whether the connected program is a store.

    Raises OSError if the network fails.
    """
    deadline = monotonic() + seconds
    answer = b""
    try:
        connection.sendall(PROBE_REQUEST)
        while len(answer) < KEY_COUNT.size:
            connection.settimeout(max(0.001, deadline - monotonic()))
            piece = connection.recv(KEY_COUNT.size - len(answer))
            if not piece:
                break
            answer += piece
    except (TimeoutError, ConnectionResetError, BrokenPipeError):
        pass
    if len(answer) == KEY_COUNT.size and 0 <= KEY_COUNT.unpack(answer)[0] < MAX_KEY_COUNT:
        return ProbeResult.STORE
    return ProbeResult.NOT_A_STORE if answer else ProbeResult.NO_ANSWER


def is_port_taken(error: OSError) -> bool:
    return error.errno == errno.EADDRINUSE
