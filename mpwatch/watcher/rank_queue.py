"""Delays each call of a WorkerGroup until all ranks that the call needs are free.

Calls that need the same rank run in the order in which they were made.

Each call has a ticket, and each rank has a queue of the tickets of all calls that need this rank. A ticket is granted, and
its call may begin, when the ticket is the first one in the queues of all its ranks. When a call ends, its ticket leaves the
queues.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable


class Ticket:
    """The ticket of one call. For example, if the call needs rank 3, the queue of rank 3 contains the ticket.

    Args:
        ranks: the ranks that the call needs.
        on_grant: is called in any thread when the call may begin. It is called again if an exception has interrupted it.
            Two threads may call it at the same time. If it is None, a thread waits for `is_granted`.
    """

    def __init__(self, ranks: Collection[int], on_grant: Callable[[], object] | None = None) -> None:
        self.ranks = ranks
        self.on_grant = on_grant
        self.is_granted = threading.Event()
        self.has_left = False

    def wait(self) -> bool:
        """Wait until the ticket is granted or has left the queues. Return False if the ticket has left the queues."""
        self.is_granted.wait()
        return not self.has_left


Queue = OrderedDict[Ticket, None]  # of one rank: the tickets that need it, in their order


class RankQueue:
    """The calls of one WorkerGroup that are running or waiting for their ranks.

    Any thread and any signal handler may call the methods of this class. If an exception such as KeyboardInterrupt
    interrupts a method, the method can be called again.

    Args:
        nprocs: number of ranks of the group.
    """

    def __init__(self, nprocs: int) -> None:
        self._lock = threading.RLock()  # a signal handler may cancel a call
        self._queues: list[Queue] = [OrderedDict() for _ in range(nprocs)]
        self._starting: dict[Ticket, Callable[[], object]] = {}  # granted tickets whose `on_grant` has not returned yet

    def enter(self, ticket: Ticket) -> None:
        """Add a ticket to the queues of its ranks, and grant the ticket if it is the first one in all of these queues."""
        with self._lock:
            for rank in ticket.ranks:
                self._queues[rank][ticket] = None
        self._grant([ticket])

    def step_back(self, ticket: Ticket, first: Ticket) -> None:
        """Withdraw the grant of `ticket`, and insert the other ticket, `first`, before `ticket` in all queues.

        Args:
            ticket: a ticket that was granted. A thread waits for it afterwards. If the ticket has left the queues, this wait
                ends at once.
            first: a ticket for all ranks. It comes before all tickets that have not been granted.
        """
        with self._lock:
            if not ticket.has_left:  # the call may have been cancelled
                ticket.on_grant = None
                ticket.is_granted.clear()
            for queue in self._queues:
                head = _get_first(queue)
                queue[first] = None
                queue.move_to_end(first, last=False)
                if head is not None and head.is_granted.is_set():
                    queue.move_to_end(head, last=False)
        self._grant([first])

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket from the queues, even if the ticket was granted.

        It is no error if the ticket has already left the queues.
        """
        with self._lock:
            for rank in ticket.ranks:
                self._queues[rank].pop(ticket, None)
            self._starting.pop(ticket, None)
            ticket.on_grant = None
            ticket.has_left = True
            ticket.is_granted.set()
        self._grant(first for rank in ticket.ranks if (first := _get_first(self._queues[rank])) is not None)

    def _grant(self, candidates: Iterable[Ticket]) -> None:
        """Grant each ticket in `candidates` if it is at the front of the queue of every rank that its call needs."""
        with self._lock:
            for ticket in candidates:
                is_first = all(_get_first(self._queues[rank]) is ticket for rank in ticket.ranks)
                if is_first and not ticket.is_granted.is_set():
                    if ticket.on_grant is not None:
                        self._starting[ticket] = ticket.on_grant
                    ticket.is_granted.set()
            starting = list(self._starting.items())
        for ticket, on_grant in starting:
            on_grant()
            with self._lock:
                self._starting.pop(ticket, None)


def _get_first(queue: Queue) -> Ticket | None:
    while True:
        try:
            return next(iter(queue), None)
        except RuntimeError:  # a signal handler has cancelled a call between `iter` and `next`
            continue
