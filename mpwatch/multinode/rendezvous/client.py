"""One node's part in torch's rendezvous: connect to the store, join round after round, leave.

Blocking calls, for one thread of the node; only `cancel` is for others. Each ends by a deadline, or when it is cancelled, or
when the store cannot be reached any more, which is noticed also on a network that is silent. Torch does the meeting
(meetings.py); by which clock, is said in clocks.py, and how its store is reached, in opening.py and store.py.
"""

import math
import threading
import time
from collections.abc import Callable

from mpwatch.multinode.rendezvous.cancellable_wait import Deadline
from mpwatch.multinode.rendezvous.open_store import OpenedStore, open_store
from mpwatch.multinode.rendezvous.rounds import DynamicRendezvous, Round, StaticRendezvous
from mpwatch.multinode.rendezvous.store import PrefixedStore, StoreConnection
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.os_support.processes import await_end_of_thread

OVER = "over"  # a key in the store of the job
LAST_CALL_SECONDS = 30.0  # as torch has it
LEAVE_SECONDS = 1.0  # to tell the others, then the connection is cut
CUT_SECONDS = 0.5  # for a thread to notice that
# For the others to leave, which takes some hundredths of a second; the state may also tell of those that were lost.
SEE_OFF_SECONDS, SEE_OFF_POLL_SECONDS = 0.3, 0.01


class RendezvousClient:
    """The rendezvous of one node of one job.

    Args:
        rendezvous: where and on what terms. Nothing is opened yet.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._cancelled = threading.Event()
        self._opened: OpenedStore | None = None
        self._meeting: DynamicRendezvous | StaticRendezvous | None = None
        self.is_host = False
        """Whether this process serves the store: it should leave last. False until it is connected."""
        self.backend = rendezvous.backend
        """What torch calls this kind of rendezvous."""
        self.address = rendezvous.local_addr or ""
        """By which name or address the other nodes reach this one. Empty until it is connected, unless it was given."""

    def connect(self, deadline: float) -> None:
        """Serve the store, or wait until it is served, and connect to it.

        Args:
            deadline: of the monotonic clock.

        Raises LaunchError, which says what was in the way and how to mend it, and CancelledError.
        """
        opened = open_store(self._rendezvous, Deadline(deadline, self._cancelled))
        self._opened = opened
        self.is_host = opened.is_host
        self.address = self.address or opened.local
        if opened.backend is None:
            self._meeting = StaticRendezvous(self._rendezvous, opened)
        else:
            self._meeting = DynamicRendezvous(self._rendezvous, opened, self.address)

    def join(self, deadline: float, *, last_call: float | None = None, enough: float = math.inf) -> Round:
        """Take part in the next round: leaves the one before. Returns when it has formed.

        Args:
            deadline: of the monotonic clock.
            last_call: seconds to wait for more nodes once there are enough. None: options["last_call_timeout"], else 30. It
                counts from when a node sees that there are enough, and the one that waits least forms the round.
            enough: so many of the last round are known to come: with them, and none waiting besides, the last call is over.

        Raises LaunchError when the time is over, and says how many have come; CancelledError; ClosedError; StoreLostError.
        After these, but for the last, this node takes part in nothing, and the others do not wait for it.
        """
        if last_call is None:
            last_call = float(self._rendezvous.options.get("last_call_timeout", LAST_CALL_SECONDS))
        return self._connected().join(Deadline(deadline, self._cancelled), last_call, enough)

    def waiting(self) -> int:
        """How many newcomers wait for the next round. Raises StoreLostError."""
        return self._connected().waiting()

    def set_closed(self) -> None:
        """The job is over, for everybody: nobody joins any more. Raises StoreLostError."""
        if (store := self.store_of_job()) is not None:
            store.set(OVER, "1")  # for who does not want to join just now
        self._connected().set_closed()

    def store_of_job(self) -> PrefixedStore | None:
        """What the nodes of the job have in common before they meet, and in all rounds; None if there is nothing."""
        assert self._opened is not None, "connect() comes first"
        return PrefixedStore(self._opened.connection, f"mpwatch.{self._rendezvous.run_id}")

    def _connected(self) -> DynamicRendezvous | StaticRendezvous:
        assert self._meeting is not None, "connect() comes first, and nothing after close()"
        return self._meeting

    def cancel(self) -> None:
        """From any thread: end `connect` and `join`, in a second at most if one is in progress, at once from then on."""
        self._cancelled.set()

    def close(self) -> None:
        """Leave the round, and give back everything: threads, sockets, and the server, if this process has it.

        In 2 s, whatever the network does. A resolver that is stuck ends by its own timeouts.
        """
        self.cancel()
        opened, meeting = self._opened, self._meeting
        self._opened = self._meeting = None
        if opened is None:
            return
        if meeting is not None:
            leave_in_time(meeting.leave, opened.connection)
            if opened.is_host:
                _see_off_others(meeting)
        opened.connection.close()


def _see_off_others(meeting: DynamicRendezvous | StaticRendezvous) -> None:
    """Keep the store for those who are just leaving, too: torch prints a page where a store goes in the midst of a call."""
    deadline = time.monotonic() + SEE_OFF_SECONDS
    while meeting.has_others() and time.monotonic() < deadline:
        time.sleep(SEE_OFF_POLL_SECONDS)


def leave_in_time(leave: Callable[[], object], connection: StoreConnection) -> None:
    """Tell the others, by that connection, but for no longer than it may take."""
    leaving = threading.Thread(target=leave, name="mpwatch-leave", daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)
    if leaving.is_alive():
        connection.cut()
        leaving.join(CUT_SECONDS)
    if leaving.native_id is not None and not leaving.is_alive():
        await_end_of_thread(leaving.native_id)
