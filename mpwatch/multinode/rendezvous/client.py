"""One node's part in torch's rendezvous: connect to the store, join rounds, leave.

The node thread makes all calls, and they block. Only `cancel` may be called from other threads. Each call ends at its
deadline, when it is cancelled, or when the store is lost. A store that has gone silent counts as lost, too (store.py).

    connect --> join --> join --> ... --> close
       |          '-- rounds.py: torch's dynamic rendezvous, or a static one
       '-- open_store.py: serve the store, or connect to it
"""

import math
import threading
import time
from collections.abc import Callable

from mpwatch.multinode.rendezvous.cancellable_wait import Deadline
from mpwatch.multinode.rendezvous.open_store import OpenedStore, open_store
from mpwatch.multinode.rendezvous.rounds import DynamicRendezvous, Round, StaticRendezvous, WaitReport
from mpwatch.multinode.rendezvous.store import PrefixedStore, StoreConnection
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.os_support.processes import wait_for_thread_exit

JOB_OVER_KEY = "over"  # in the store of the job
LAST_CALL_SECONDS = 30.0  # torch's default
LEAVE_SECONDS = 1.0  # for this node to leave the round; then its connection is shut down
SHUTDOWN_SECONDS = 0.5  # for the leaving thread to notice the shutdown
# The node that serves the store waits so long for the others to leave. They need some hundredths of a second. The limit is
# needed because nodes that were lost do not leave.
OTHERS_LEAVE_SECONDS, OTHERS_LEAVE_POLL_SECONDS = 0.3, 0.01


class RendezvousClient:
    """The rendezvous of one node of one job.

    Args:
        rendezvous: the options. The constructor opens nothing.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._cancelled = threading.Event()
        self._opened_store: OpenedStore | None = None
        self._implementation: DynamicRendezvous | StaticRendezvous | None = None
        self.is_host = False
        """Whether this process serves the store, and should leave last. False until `connect` returns."""
        self.backend = rendezvous.backend
        """Torch's name for this kind of rendezvous."""
        self.address = rendezvous.local_addr or ""
        """Name or address by which the other nodes reach this node. Without `local_addr`, empty until `connect` returns."""

    def connect(self, deadline: float) -> None:
        """Serve the store, or wait until another node serves it, and connect to it.

        Args:
            deadline: seconds on the monotonic clock.

        Raises LaunchError, with the obstacle and what to do about it, and CancelledError.
        """
        opened = open_store(self._rendezvous, Deadline(deadline, self._cancelled))
        self._opened_store = opened
        self.is_host = opened.is_host
        self.address = self.address or opened.local_addr
        if opened.backend is None:
            self._implementation = StaticRendezvous(self._rendezvous, opened)
        else:
            self._implementation = DynamicRendezvous(self._rendezvous, opened, self.address)

    def join(
        self,
        deadline: float,
        *,
        last_call: float | None = None,
        expected_nodes: float = math.inf,
        wait_report: WaitReport | None = None,
    ) -> Round:
        """Leave the previous round, join the next one, and return it when it is complete.

        Args:
            deadline: seconds on the monotonic clock.
            last_call: seconds to wait for more nodes once the minimum has joined. None: options["last_call_timeout"], else
                30. The time runs from the moment at which a node sees that the minimum has joined. The node with the
                shortest last call completes the round.
            expected_nodes: number of nodes of the previous round that will join again. When they have joined and no other
                node waits, the last call ends at once.
            wait_report: reports that this node waits. None: nothing does.

        Raises LaunchError when the time is over, with the number of nodes that have joined. Raises CancelledError,
        JobClosedError and StoreLostError. After an error other than StoreLostError this node has left the rendezvous, and
        the other nodes do not wait for it.
        """
        if last_call is None:
            last_call = float(self._rendezvous.options.get("last_call_timeout", LAST_CALL_SECONDS))
        return self._get_implementation().join(Deadline(deadline, self._cancelled), last_call, expected_nodes, wait_report)

    def count_waiting_nodes(self) -> int:
        """Return how many nodes wait to join the next round. Raises StoreLostError."""
        return self._get_implementation().count_waiting_nodes()

    def set_closed(self) -> None:
        """Close the rendezvous for all nodes: the job is over, and no node can join any more. Raises StoreLostError."""
        if (store := self.get_job_store()) is not None:
            store.set(JOB_OVER_KEY, "1")  # for nodes that check it before they join
        self._get_implementation().set_closed()

    def get_job_store(self) -> PrefixedStore | None:
        """Return the part of the store that all rounds of the job share, or None if there is none."""
        assert self._opened_store is not None, "call connect() first"
        return PrefixedStore(self._opened_store.connection, f"mpwatch.{self._rendezvous.run_id}")

    def _get_implementation(self) -> DynamicRendezvous | StaticRendezvous:
        assert self._implementation is not None, "call connect() first, and nothing after close()"
        return self._implementation

    def cancel(self) -> None:
        """End `connect` and `join` from any thread: within 1 s if one is in progress, and at once from then on."""
        self._cancelled.set()

    def close(self) -> None:
        """Leave the round. Release all threads and sockets, and the server of the store if this process runs it.

        Takes at most 2 s, whatever the network does. A resolver call that is stuck ends by its own timeouts.
        """
        self.cancel()
        opened, implementation = self._opened_store, self._implementation
        self._opened_store = self._implementation = None
        if opened is None:
            return
        if implementation is not None:
            leave_within_limit(implementation.leave, opened.connection)
            if opened.is_host:
                wait_for_others_to_leave(implementation.has_other_nodes)
        opened.connection.close()


def leave_within_limit(leave: Callable[[], object], connection: StoreConnection) -> None:
    """Call `leave` on a thread. If it takes too long, shut down the connection that it uses."""
    thread = threading.Thread(target=leave, name="mpwatch-leave", daemon=True)
    thread.start()
    thread.join(LEAVE_SECONDS)
    if thread.is_alive():
        connection.shut_down()
        thread.join(SHUTDOWN_SECONDS)
    if thread.native_id is not None and not thread.is_alive():
        wait_for_thread_exit(thread.native_id)


def wait_for_others_to_leave(has_other_nodes: Callable[[], bool]) -> None:
    """Keep the store for nodes that are just leaving.

    Torch prints a page of C++ frames if its server goes away during a call.
    """
    deadline = time.monotonic() + OTHERS_LEAVE_SECONDS
    while has_other_nodes() and time.monotonic() < deadline:
        time.sleep(OTHERS_LEAVE_POLL_SECONDS)
