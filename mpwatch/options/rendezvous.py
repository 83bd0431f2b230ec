"""`Rendezvous`: where the nodes of a job meet, and on what terms. Data, validated once; who meets there is in elastic/."""

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from mpwatch.options.validation import check_count, check_flag, check_seconds, is_port

LEAST_NODE_TIMEOUT = 2.0  # seconds: a few signs of life have to fit in, and a store that is busy for a moment
SECRET_VARIABLE = "MPWATCH_SECRET"  # noqa: S105  the name of a variable
LAST_CALL = "last_call_timeout"
BACKENDS = {"c10d": (LAST_CALL,), "static": (LAST_CALL, "rank")}  # and their options


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of one job meet: the `rendezvous` of `mpwatch.run`. Each node makes the same call.

        mpwatch.run(train, nprocs=8, rendezvous=Rendezvous("node0:29400", run_id="job-17", nnodes=(2, 4)))

    The nodes meet in a store of torch's (`torch.distributed.elastic.rendezvous`). One of them serves it: the one that
    `endpoint` names, unless it lives elsewhere. Whoever can reach the store can disturb the job: torch's rendezvous
    itself trusts its network (see the README).

    Raises TypeError or ValueError naming the argument and the value.
    """

    endpoint: str
    """`host:port` of the store; port 29400 if there is none."""
    run_id: str
    """Name of the job: nodes that give the same one to the same store meet. It is that of events and of the logs' folder."""
    nnodes: int | tuple[int, int]
    """How many nodes: a number, or (min, max): it begins with min, takes in newcomers up to max, and goes on as long as
    min remain."""
    _: KW_ONLY
    backend: str = "c10d"
    """How the nodes find their ranks. "c10d": by torch's dynamic rendezvous; nodes may join and leave. "static": each node
    gives its own rank: options={"rank": 0}."""
    join_timeout: float = 600.0
    """Seconds in which the nodes have to come together; and, if too few remain, for others to come."""
    node_timeout: float = 15.0
    """Seconds without a sign of life after which a node is lost, from 2 on. A node that cannot reach the store stops its
    ranks within that time."""
    exit_barrier_timeout: float = 300.0
    """Seconds that the node which serves the store waits, when the job is over, until all others know what came of it."""
    is_host: bool | None = None
    """Whether this node serves the store. None: if `endpoint` is an address of this machine."""
    local_addr: str | None = None
    """Address or name by which the other nodes reach this one. None: that of the interface that leads to the store."""
    secret: str | bytes | None = field(default=None, repr=False)
    """What only the nodes of the job know; all that they tell one another is signed with it. None: what the environment
    variable MPWATCH_SECRET holds, if it is set."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the backend, in torch's words. "c10d": `last_call_timeout`, the seconds to wait for more nodes
    once min are there (30). "static": `rank`."""

    def __post_init__(self) -> None:
        _check_text("endpoint", self.endpoint)
        _check_port(self.endpoint)
        _check_text("run_id", self.run_id)
        if "/" in self.run_id or self.run_id in (".", ".."):
            raise ValueError(f"rendezvous: run_id also names the folder of logs, and cannot be {self.run_id!r:.200}")
        object.__setattr__(self, "nnodes", _range(self.nnodes))
        if self.backend not in BACKENDS:
            raise ValueError(f"rendezvous: backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        check_seconds("rendezvous: join_timeout", self.join_timeout, at_least="more than 0")
        check_seconds("rendezvous: node_timeout", self.node_timeout, at_least="more than 0")
        if self.node_timeout < LEAST_NODE_TIMEOUT:
            raise ValueError(f"rendezvous: node_timeout must be at least 2 seconds, not {self.node_timeout!r}")
        check_seconds("rendezvous: exit_barrier_timeout", self.exit_barrier_timeout, at_least="0 or more")
        if self.is_host is not None:
            check_flag("rendezvous: is_host", self.is_host)
        if self.local_addr is not None:
            _check_text("local_addr", self.local_addr)
        object.__setattr__(self, "secret", _secret(self.secret))
        self._check_options()

    @property
    def min_nodes(self) -> int:
        """With how many the job can be."""
        assert isinstance(self.nnodes, tuple)  # see above
        return self.nnodes[0]

    @property
    def max_nodes(self) -> int:
        """With how many at most."""
        assert isinstance(self.nnodes, tuple)
        return self.nnodes[1]

    @property
    def key(self) -> bytes:
        """The secret; empty if there is none."""
        return self.secret if isinstance(self.secret, bytes) else b""  # see above

    def _check_options(self) -> None:
        options: object = self.options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise TypeError(f"rendezvous: options must be a mapping with strings as keys, not {options!r:.200}")
        if LAST_CALL in self.options:
            check_seconds(f"rendezvous: options[{LAST_CALL!r}]", self.options[LAST_CALL], at_least="0 or more")
        known = BACKENDS[self.backend]
        if unknown := sorted(self.options.keys() - known):
            names = " and ".join(map(repr, known))
            raise ValueError(f"rendezvous: backend={self.backend!r} has no other options than {names}, not {unknown!r:.200}")
        if self.backend != "static":
            return
        if self.min_nodes != self.max_nodes:
            raise ValueError(f"rendezvous: backend='static' knows its nodes; nnodes must be a number, not {self.nnodes!r}")
        if "rank" not in self.options:
            raise ValueError("rendezvous: backend='static' needs the number of this node: options={'rank': 0}")
        rank = check_count("rendezvous: options['rank']", self.options["rank"], at_least=0)
        if rank >= self.max_nodes:
            raise ValueError(f"rendezvous: options['rank'] must be below nnodes={self.max_nodes}, not {rank!r}")


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


def _range(nnodes: object) -> tuple[int, int]:
    if isinstance(nnodes, tuple | list):
        if len(nnodes) != 2:  # noqa: PLR2004
            raise ValueError(f"rendezvous: nnodes must be a number or (min, max), not {nnodes!r}")
        least = check_count("rendezvous: nnodes", nnodes[0], at_least=1)
        return least, check_count("rendezvous: max of nnodes", nnodes[1], at_least=least)
    count = check_count("rendezvous: nnodes", nnodes, at_least=1)
    return count, count


def _secret(secret: object) -> bytes | None:
    if secret is None:
        return os.environb.get(SECRET_VARIABLE.encode()) or None
    if not isinstance(secret, str | bytes):
        raise TypeError("rendezvous: secret must be a string or bytes")  # and nobody else is told what it is
    if not secret:
        raise ValueError("rendezvous: secret must not be empty")
    return secret.encode() if isinstance(secret, str) else secret
