"""Which call of a WorkerGroup may use which ranks: calls that need the same rank run in the order in which they came.

A Ticket enters the queue and waits. It is granted when no earlier ticket waits for one of its ranks, and no other ticket has
one of them. It leaves the queue at the end of the call.
"""

import threading
from collections.abc import Callable, Collection
from typing import Any


class Ticket:
    """A place in the queue.

    Args:
        ranks: the ranks that the call needs.
        on_grant: called in any thread when the call may begin. It is called again if an exception has interrupted it, and
            may be called by two threads at the same time. None: a thread waits for `is_granted`.
        owner: see `RankQueue.list_owners`.
    """

    def __init__(
        self, ranks: Collection[int], on_grant: Callable[[], object] | None = None, owner: object | None = None
    ) -> None:
        self.ranks = frozenset(ranks)
        self.on_grant = on_grant
        self.owner = owner
        self.is_granted = threading.Event()


class RankQueue:
    """The calls of one WorkerGroup that wait or run. Any thread may call the methods.

    An exception, such as KeyboardInterrupt, may interrupt any method. It can then be called again.

    Args:
        nprocs: number of ranks of the group.
    """

    def __init__(self, nprocs: int) -> None:
        self._nprocs = nprocs
        self._lock = threading.Lock()
        self._tickets: dict[Ticket, None] = {}  # in the order in which they came
        self._starting: dict[Ticket, Callable[[], object]] = {}  # granted tickets whose `on_grant` has not returned yet

    def enter(self, ticket: Ticket) -> None:
        """Let a ticket wait. It may be granted at once."""
        with self._lock:
            self._tickets[ticket] = None
        self._grant()

    def exchange(self, ticket: Ticket, ranks: Collection[int]) -> None:
        """Let a granted ticket wait for other ranks, at its old place in the queue. A thread waits for `is_granted`."""
        with self._lock:
            ticket.is_granted.clear()
            ticket.ranks, ticket.on_grant = frozenset(ranks), None
        self._grant()

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket that waits or was granted. Do nothing if it is not in the queue."""
        with self._lock:
            self._tickets.pop(ticket, None)
            self._starting.pop(ticket, None)
        self._grant()

    def list_owners(self) -> list[Any]:
        """Return the owners of all tickets that wait or were granted, in the order of the tickets."""
        with self._lock:
            return [ticket.owner for ticket in self._tickets if ticket.owner is not None]

    def _grant(self) -> None:
        with self._lock:
            for ticket in self._find_ready():
                if ticket.on_grant is not None:
                    self._starting[ticket] = ticket.on_grant
                ticket.is_granted.set()
            starting = dict(self._starting)
        for ticket, on_grant in starting.items():
            on_grant()
            with self._lock:
                self._starting.pop(ticket, None)

    def _find_ready(self) -> list[Ticket]:
        needed = {rank for ticket in self._tickets if ticket.is_granted.is_set() for rank in ticket.ranks}
        ready = []
        for ticket in self._tickets:
            if len(needed) == self._nprocs:
                break
            if not ticket.is_granted.is_set():
                if needed.isdisjoint(ticket.ranks):
                    ready.append(ticket)
                needed |= ticket.ranks
        return ready
