"""Delays each call of a WorkerGroup until all ranks that it needs are free.

Each call has a ticket. A ticket is granted when no earlier one needs any of its ranks, and leaves when its call is over.
"""

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from queue import SimpleQueue


class Ticket:
    """Of one call. `on_grant` is called when it may begin, in any thread, maybe several times. If it is None, a thread
    waits.
    """

    def __init__(self, ranks: Collection[int], on_grant: Callable[[], object] | None = None) -> None:
        self.ranks = ranks
        self.needed = ranks  # all ranks, between `RankQueue.widen` and `narrow`
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

    def __init__(self, nprocs: int) -> None:
        self._all_ranks = range(nprocs)
        self._lock = threading.RLock()  # a signal handler may cancel a call
        self._waiting: list[Ticket] = []  # in the order in which the calls were made
        self._granted: list[Ticket] = []

    def enter(self, ticket: Ticket) -> None:
        with self._lock:
            self._waiting.append(ticket)
        self._grant()

    def widen(self, ticket: Ticket) -> None:
        """Give up the ranks of a granted ticket, and wait in its old place for all, or until `narrow` gives its own back."""
        with self._lock:
            ticket.needed, ticket.on_grant, ticket.is_granted = self._all_ranks, None, False
            self._waiting.insert(0, ticket)
        self._grant()
        ticket.wait()

    def narrow(self) -> None:
        """Let each ticket need only the ranks of its call again."""
        with self._lock:
            for ticket in (*self._granted, *self._waiting):
                ticket.needed = ticket.ranks
        self._grant()

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket, granted or not. It is no error if it has left already."""
        ticket.has_left = True
        with self._lock, suppress(ValueError):
            self._waiting.remove(ticket)
        self._grant()

    def _grant(self) -> None:
        with self._lock:
            self._granted = [ticket for ticket in self._granted if ticket.is_granted and not ticket.has_left]
            taken = {rank for ticket in self._granted for rank in ticket.needed}
            for ticket in self._waiting[:]:
                if len(taken) == len(self._all_ranks):
                    break
                if not ticket.has_left and taken.isdisjoint(ticket.needed):
                    ticket.grant()
                    self._granted.append(ticket)
                    self._waiting.remove(ticket)
                taken.update(ticket.needed)
            granted = list(self._granted)
        for ticket in granted:
            if (on_grant := ticket.on_grant) is not None:
                on_grant()
