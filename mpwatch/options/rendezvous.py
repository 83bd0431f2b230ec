"""`Rendezvous` contains validated options that say how the nodes of a job find one another."""

import os
from dataclasses import KW_ONLY, dataclass, field

from mpwatch.options.validation import check_count, check_seconds, is_port

MIN_NODE_TIMEOUT = 2.0  # seconds; enough for a few heartbeats, and for a store that is busy for a moment
SECRET_VARIABLE = "MPWATCH_SECRET"  # noqa: S105  the name of a variable


@dataclass(frozen=True)
class Rendezvous:
    """How the nodes of one job find one another. The option `rendezvous` of `mpwatch.run` is a Rendezvous.

    Each node makes the same call:

        mpwatch.run(train, nprocs=8, rendezvous=Rendezvous("node0:29400", run_id="job-17", nnodes=(2, 4)))

    A coordinator runs in the program of the node whose address is in `endpoint`. All nodes connect to it, and it decides for
    the job. If it ends, the job ends. Without a secret, whoever can reach its port can take part in the job: see the page
    "Security" of the documentation.

    Args:
        endpoint: `host:port` of the coordinator. The default port is 29400. Each job needs a port of its own.
        run_id: name of the job, the same on all nodes. The folder of logs has this name, too.
        nnodes: number of nodes, or (min, max). The job begins with min nodes and accepts new nodes up to max. It continues
            while at least min nodes remain.
        role: name of the kind of work that the ranks of this node do. ROLE_RANK numbers the ranks of the same role.
        rank: place of this node among the nodes, which are sorted by it. None: the node of the coordinator is the
            first, and the others are numbered as they come.
        join_timeout: seconds within which the nodes must join. If too few nodes remain later, new nodes have the same time
            to join.
        last_call_timeout: seconds to wait for more nodes after min nodes have joined.
        node_timeout: seconds of silence after which a node counts as lost, at least 2. A node that hears nothing from the
            coordinator stops its ranks within this time. If the program of a node ends, the others know at once.
        exit_barrier_timeout: seconds for which the coordinator waits at the end of the job until all nodes have the result.
        is_host: whether the coordinator runs in the program of this node. None means that it does if `endpoint` is an
            address of this machine.
        local_addr: address or name under which other nodes reach this node. None means the address of the network interface
            that leads to the coordinator.
        secret: a secret that all nodes of this job share. All messages between nodes are signed with it (HMAC). None means
            the value of the environment variable MPWATCH_SECRET, if it is set.

    Raises TypeError or ValueError if an argument is invalid. The error text contains the name and the value of the invalid
    argument, but never the value of `secret`.
    """

    endpoint: str
    run_id: str
    nnodes: int | tuple[int, int]
    _: KW_ONLY
    role: str = "default"
    rank: int | None = None
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    node_timeout: float = 15.0
    exit_barrier_timeout: float = 300.0
    is_host: bool | None = None
    local_addr: str | None = None
    secret: str | bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_text("endpoint", self.endpoint)
        _check_port(self.endpoint)
        _check_text("run_id", self.run_id)
        if "/" in self.run_id or self.run_id in (".", ".."):
            raise ValueError(f"rendezvous: run_id also names the folder of logs, and cannot be {self.run_id!r:.200}")
        _check_text("role", self.role)
        object.__setattr__(self, "nnodes", as_node_range("rendezvous: nnodes", self.nnodes))
        if self.rank is not None:
            object.__setattr__(self, "rank", check_count("rendezvous: rank", self.rank, at_least=0))
        check_seconds("rendezvous: last_call_timeout", self.last_call_timeout, at_least="0 or more")
        check_seconds("rendezvous: join_timeout", self.join_timeout, at_least="more than 0")
        check_seconds("rendezvous: node_timeout", self.node_timeout, at_least="more than 0")
        if self.node_timeout < MIN_NODE_TIMEOUT:
            raise ValueError(f"rendezvous: node_timeout must be at least 2 seconds, not {self.node_timeout!r}")
        check_seconds("rendezvous: exit_barrier_timeout", self.exit_barrier_timeout, at_least="0 or more")
        if self.local_addr is not None:
            _check_text("local_addr", self.local_addr)
        object.__setattr__(self, "secret", _as_secret(self.secret))

    @property
    def min_nodes(self) -> int:
        """The smallest number of nodes with which the job runs."""
        assert isinstance(self.nnodes, tuple)  # see above
        return self.nnodes[0]

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes with which the job runs."""
        assert isinstance(self.nnodes, tuple)
        return self.nnodes[1]

    @property
    def key(self) -> bytes:
        """The secret as bytes, or empty bytes if there is no secret."""
        return self.secret if isinstance(self.secret, bytes) else b""  # see above


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"rendezvous: {name} must be a string, not {value!r:.200}")
    if not value or not value.isprintable() or value != value.strip():
        raise ValueError(f"rendezvous: {name} must not be empty, nor have blanks around it, not {value!r:.200}")


def _check_port(endpoint: str) -> None:
    host, colon, port = endpoint.rpartition(":")
    if endpoint.endswith("]") or not colon:
        return
    if not host or not is_port(port):
        raise ValueError(f"rendezvous: endpoint must be host:port, such as 'node0:29400', not {endpoint!r}")


def as_node_range(name: str, nodes: object) -> tuple[int, int]:
    if isinstance(nodes, tuple | list):
        if len(nodes) != 2:  # noqa: PLR2004
            raise ValueError(f"{name} must be a number or (min, max), not {nodes!r}")
        least = check_count(name, nodes[0], at_least=1)
        return least, check_count(f"{name} (max)", nodes[1], at_least=least)
    count = check_count(name, nodes, at_least=1)
    return count, count


def _as_secret(secret: object) -> bytes | None:
    if secret is None:
        return os.environb.get(SECRET_VARIABLE.encode()) or None
    if not isinstance(secret, str | bytes):
        raise TypeError("rendezvous: secret must be a string or bytes")  # the message does not show its value
    if not secret:
        raise ValueError("rendezvous: secret must not be empty")
    return secret.encode() if isinstance(secret, str) else secret
