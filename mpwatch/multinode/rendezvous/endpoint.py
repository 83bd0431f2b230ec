"""Where the store is: names, addresses and ports, by plain sockets, before torch is asked for anything.

Torch's client says what is wrong in pages of C++, and waits for ever for a listener that is no store. So whether a name can
be resolved, somebody listens, and what listens is a store, is found out here: bounded, to be cancelled, and with errors that
say how to mend it. Imports no torch.
"""

import errno
import socket
import struct
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from mpwatch.errors import LaunchError
from mpwatch.multinode.rendezvous.cancellable_wait import POLL_SECONDS, Deadline, wait_for

TRY_SECONDS = 0.5  # to connect, and again to be answered: somebody may cancel, and the next try is soon
ANSWER_SECONDS = 2.0  # for a store on this machine, before it is said to be none
# As torch's own clients begin: they validate themselves. Then the question how many keys there are, which stores of all
# versions answer (a ping those of torch 2.4 do not).
GREETING = struct.pack("=BIB", 0, 0x3C85F7CE, 7)
NUMBER = struct.Struct("=q")
MOST_KEYS = 1 << 32  # what is more is a text

Address = tuple[socket.AddressFamily, Any]
"""A family, and an address as the socket calls of that family take it."""


@dataclass(frozen=True)
class Endpoint:
    """`host:port`, taken apart. Where the endpoint gives no port it is the default one."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str, default_port: int) -> "Endpoint":
        """As `Rendezvous` has let it pass; an IPv6 address stands in brackets."""
        host, colon, port = text.rpartition(":")
        if not colon or text.endswith("]"):
            host, port = text, str(default_port)
        return cls(host[1:-1] if host.startswith("[") and host.endswith("]") else host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Listener:
    """Who listens at the endpoint: by which address it is reached, and which of ours leads there."""

    host: str
    local: str


class ProbeResult(Enum):
    """What somebody who listens says to a client of torch's store."""

    STORE = auto()
    NOTHING = auto()
    """It says nothing, or hangs up: a store that is stopped, a proxy in front of nobody, or something else."""
    STRANGE = auto()
    """It says what no store would."""


def resolve(endpoint: Endpoint, limit: Deadline) -> list[Address]:
    """The addresses of the endpoint. Raises socket.gaierror, also if it takes too long, and CancelledError."""
    try:
        return _addresses(endpoint, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    try:
        return wait_for(lambda: _addresses(endpoint, 0), limit, "mpwatch-resolver")
    except TimeoutError:
        raise socket.gaierror(socket.EAI_AGAIN, "the resolver has not answered in time") from None
    except UnicodeError as error:  # no name of a host
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error


def _addresses(endpoint: Endpoint, flags: int) -> list[Address]:
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


def is_here(address: Address) -> bool:
    """Whether that is an address of this machine: one that can be bound."""
    family, (host, _, *rest) = address
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0, *rest))
        except OSError:
            return False
    return True


def listen(endpoint: Endpoint, here: Address | None) -> socket.socket:
    """A socket that listens at the endpoint. Raises OSError; EADDRINUSE where somebody else does.

    An endpoint that gives an address of this machine is served at that address alone. A name is another one's business:
    where it is known on this machine by a loopback address (as Debian has it), the others know it by the one they reach.
    """
    if here and here[1][0] == endpoint.host:
        return socket.create_server(here[1], family=here[0], backlog=socket.SOMAXCONN)
    if socket.has_dualstack_ipv6():
        wide = ("::", endpoint.port)
        return socket.create_server(wide, family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN)
    return socket.create_server(("", endpoint.port), backlog=socket.SOMAXCONN)


def look(endpoint: Endpoint, addresses: list[Address], limit: Deadline) -> Listener | str:
    """Return the store that listens at one of these addresses, or a text that says why none was found.

    Raises LaunchError if what listens there is no store, and CancelledError.
    """
    trouble = ""
    for family, address in addresses:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(limit.left(TRY_SECONDS) or POLL_SECONDS)
                connection.connect(address)
                answer = ask(connection, limit.left(TRY_SECONDS) or POLL_SECONDS)
                if answer is ProbeResult.STORE:
                    return Listener(address[0], connection.getsockname()[0])
                trouble = "what listens there does not answer as a store of torch's: is the port taken by something else?"
        except ConnectionRefusedError:
            trouble = (
                "nobody listens there: is the node that the endpoint names at its mpwatch.run? If that machine does not know"
                " itself by this name, give it is_host=True"
            )
        except OSError as error:  # a timeout among them
            trouble = (
                f"it cannot be reached ({error.strerror or error}): check that the machine is up, and that no firewall keeps"
                f" the other nodes from port {endpoint.port}"
            )
        else:
            if answer is ProbeResult.STRANGE:
                raise taken(endpoint)
    return trouble


def taken(endpoint: Endpoint) -> LaunchError:
    """That something else listens there, and what to do."""
    return LaunchError(
        f"rendezvous at {endpoint}: port {endpoint.port} is taken by something that does not answer as a store of torch's."
        " Give another port, the same one on all nodes"
    )


def ask(connection: socket.socket, seconds: float) -> ProbeResult:
    """Greet as torch's clients do. Raises OSError for a connection that breaks, but for one that is hung up."""
    deadline = time.monotonic() + seconds
    heard = b""
    try:
        connection.sendall(GREETING)
        while len(heard) < NUMBER.size:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            piece = connection.recv(NUMBER.size - len(heard))
            if not piece:
                break
            heard += piece
    except (TimeoutError, ConnectionResetError, BrokenPipeError):
        pass
    if len(heard) == NUMBER.size and 0 <= NUMBER.unpack(heard)[0] < MOST_KEYS:
        return ProbeResult.STORE
    return ProbeResult.STRANGE if heard else ProbeResult.NOTHING


def is_taken(error: OSError) -> bool:
    """Whether that is why one cannot listen."""
    return error.errno == errno.EADDRINUSE
