"""Delays each call of a WorkerGroup until all ranks that it needs are free.

Each call has a ticket. A ticket is granted when no earlier one needs any of its ranks, and leaves when its call is over.
"""

import threading
from collections.abc import Callable, Collection
from queue import SimpleQueue


class Ticket:
    """Of one call: that of a thread, which waits and sets `has_left`, or that of a future, which is `done`.

    `on_grant` is called when the call may begin, in any thread, maybe several times.
    """

    def __init__(
        self,
        ranks: Collection[int],
        on_grant: Callable[[], object] = lambda: None,
        is_done: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ranks = ranks
        self.on_grant, self._is_done = on_grant, is_done
        self.has_left = False
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # no Event: an exception in `Event.set` would leave it locked

    def is_over(self) -> bool:
        return self.has_left or self._is_done()

    def grant(self) -> None:
        self._wakeups.put(None)

    def wait(self) -> None:
        self._wakeups.get()


class RankQueue:
    """The calls of one WorkerGroup. Any thread and any signal handler may use it.

    If an exception interrupts a method, the next one does the rest.
    """

    def __init__(self, nprocs: int) -> None:
        self._nprocs = nprocs
        self._lock = threading.RLock()  # a signal handler may cancel a call
        self._waiting: list[Ticket] = []  # in the order in which the calls were made
        self._granted: list[Ticket] = []

    def enter(self, ticket: Ticket) -> None:
        with self._lock:
            self._waiting.append(ticket)
        self.update()

    def update(self) -> None:
        """Forget the tickets of calls that are over, and grant those whose ranks are free."""
        with self._lock:
            self._granted = [ticket for ticket in self._granted if not ticket.is_over()]
            taken = {rank for ticket in self._granted for rank in ticket.ranks}
            for ticket in self._waiting[:]:
                if len(taken) == self._nprocs:
                    break
                if not ticket.is_over():
                    is_free = taken.isdisjoint(ticket.ranks)
                    taken.update(ticket.ranks)
                    if not is_free:
                        continue
                    ticket.grant()
                    self._granted.append(ticket)
                self._waiting.remove(ticket)
            granted = list(self._granted)
        for ticket in granted:
            ticket.on_grant()
