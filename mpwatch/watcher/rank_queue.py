"""Delays each call of a WorkerGroup until all ranks that it needs are free.

Each call has a ticket. A ticket is granted when no earlier one needs any of its ranks, and leaves when its call is over.
"""

import threading
from collections.abc import Callable, Collection
from queue import SimpleQueue


class Ticket:
    """Of one call. `on_grant` is called when it may begin, in any thread, maybe several times. If it is None, a thread
    waits.
    """

    def __init__(self, ranks: Collection[int], on_grant: Callable[[], object] | None = None) -> None:
        self.ranks = ranks
        self.on_grant = on_grant
        self.is_granted = False
        self.has_left = False
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # no Event: an exception in `Event.set` would leave it locked

    def grant(self) -> None:
        self.is_granted = True
        self._wakeups.put(None)

    def wait(self) -> None:
        while not self.is_granted:
            self._wakeups.get()


class RankQueue:
    """The calls of one WorkerGroup. Any thread and any signal handler may use it.

    If an exception interrupts a method, the next one does the rest.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may cancel a call
        self._tickets: list[Ticket] = []  # in the order in which the calls were made

    def enter(self, ticket: Ticket) -> None:
        with self._lock:
            self._tickets.append(ticket)
        self._grant()

    def exchange(self, ticket: Ticket, ranks: Collection[int]) -> None:
        """Give up the ranks of a granted ticket, and wait in its old place for these."""
        with self._lock:
            ticket.ranks, ticket.on_grant, ticket.is_granted = ranks, None, False
        self._grant()
        ticket.wait()

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket, granted or not. It is no error if it has left already."""
        ticket.has_left = True
        self._grant()

    def _grant(self) -> None:
        with self._lock:
            self._tickets = [ticket for ticket in self._tickets if not ticket.has_left]
            granted = [ticket for ticket in self._tickets if ticket.is_granted]
            taken = {rank for ticket in granted for rank in ticket.ranks}
            for ticket in self._tickets:
                if not ticket.is_granted and taken.isdisjoint(ticket.ranks):
                    ticket.grant()
                    granted.append(ticket)
                taken.update(ticket.ranks)
        for ticket in granted:
            if (on_grant := ticket.on_grant) is not None:
                on_grant()
