"""Delays each call of a WorkerGroup until all ranks that it needs are free.

Each rank has a queue with the tickets of the calls that need it, in the order in which they were made. A ticket is granted
when it is the first one in the queues of all its ranks. It leaves them when its call is over.
"""

import threading
from collections import OrderedDict
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

    def wake(self) -> None:
        self.is_granted = True
        self._wakeups.put(None)

    def wait(self) -> bool:
        """Wait until the ticket is granted or has left the queues. Return False if it has left."""
        while not self.is_granted:
            self._wakeups.get()
        return not self.has_left


Queue = OrderedDict[Ticket, None]


class RankQueue:
    """The calls of one WorkerGroup. Any thread and any signal handler may use it.

    If an exception interrupts `enter` or `leave`, the next one for these ranks does the rest.
    """

    def __init__(self, nprocs: int) -> None:
        self._lock = threading.RLock()  # a signal handler may cancel a call
        self._queues: list[Queue] = [OrderedDict() for _ in range(nprocs)]

    def enter(self, ticket: Ticket) -> None:
        with self._lock:
            for rank in ticket.ranks:
                self._queues[rank][ticket] = None
        self._grant(ticket)

    def step_back(self, ticket: Ticket, first: Ticket) -> None:
        """Withdraw the grant of `ticket`, and insert `first`, which needs all ranks, before all that were not granted.

        A thread waits for `ticket` afterwards. The wait ends at once if the ticket has left, because its call was cancelled.
        """
        with self._lock:
            if not ticket.has_left:
                ticket.on_grant = None
                ticket.is_granted = False
            for queue in self._queues:
                head = _get_first(queue)
                queue[first] = None
                queue.move_to_end(first, last=False)
                if head is not None and head.is_granted:
                    queue.move_to_end(head, last=False)
        self._grant(first)

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket, granted or not. It is no error if it has left already."""
        ticket.has_left = True  # first: from now on, it is in nobody's way
        with self._lock:
            for rank in ticket.ranks:
                self._queues[rank].pop(ticket, None)
            ticket.on_grant = None
            ticket.wake()
        self._grant(ticket)

    def _grant(self, ticket: Ticket) -> None:
        """Grant this ticket, and those that need one of its ranks, if they have come first.

        Call `on_grant` again if it was granted before, since an exception may have interrupted that.
        """
        with self._lock:
            firsts = {ticket, *(first for rank in ticket.ranks if (first := _get_first(self._queues[rank])) is not None)}
            granted = [
                first
                for first in firsts
                if not first.has_left and all(_get_first(self._queues[rank]) is first for rank in first.ranks)
            ]
            for first in granted:
                first.wake()
        for first in granted:
            if (on_grant := first.on_grant) is not None:
                on_grant()


def _get_first(queue: Queue) -> Ticket | None:
    while True:
        try:
            first = next(iter(queue), None)
        except RuntimeError:  # a signal handler has cancelled a call between `iter` and `next`
            continue
        if first is None or not first.has_left:
            return first
        queue.pop(first, None)  # an exception has interrupted `leave`
