"""Represents one node in torch's rendezvous: connects to the store, joins rounds, and leaves the rendezvous.

Only the node thread may call `connect`, `join` and the other methods that may block. Any thread may call `cancel`, which
never blocks. `connect` and `join` stop waiting at their deadline, after a call of `cancel`, or when the store is lost. A
store that does not answer any more counts as lost (store.py).

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
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.processes import wait_for_thread_exit

JOB_OVER_KEY = "over"  # in the store of the job
LAST_CALL_SECONDS = 30.0  # torch's default
LEAVE_SECONDS = 1.0  # this node has this time to leave the round. Then its connection is shut down
SHUTDOWN_SECONDS = 0.5  # the leaving thread has this time to notice the shutdown
# The node that serves the store waits this long until the others have left. They need some hundredths of a second. A limit
# is necessary because nodes that were lost never leave.
OTHERS_LEAVE_SECONDS, OTHERS_LEAVE_POLL_SECONDS = 0.3, 0.01


class RendezvousClient:
    """Represents one node in the rendezvous of one job.

    Args:
        rendezvous: the options. The constructor opens nothing.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._cancelled = threading.Event()
        self._opened_store: OpenedStore | None = None
        self._implementation: DynamicRendezvous | StaticRendezvous | None = None
        self.is_host = False
        """Whether this process serves the store. Then it should leave last. It is False until `connect` returns."""
        self.address = rendezvous.local_addr or ""
        """Name or address with which the other nodes reach this node.

        If `local_addr` is not set, it is empty until `connect` returns.
        """

    def connect(self, deadline: float) -> None:
        """Serve the store, or connect to the store as soon as another node serves it.

        Args:
            deadline: seconds on the monotonic clock.

        Raises:
            LaunchError: the store cannot be served or reached. The text names the cause and a remedy.
            CancelledError: `cancel` was called.
            StoreLostError: the store has ended just after this node connected to it.
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
        """Leave the previous round, join the next round, and return the new round when it is complete.

        Args:
            deadline: seconds on the monotonic clock.
            last_call: seconds to wait for more nodes when this node has seen that the minimum number of nodes has joined.
                If it is None, options["last_call_timeout"] is used, or 30 if this option is not set. The node with the
                shortest last call completes the round.
            expected_nodes: number of nodes of the previous round that will join again. When they have joined and no other
                node waits, the last call ends at once.
            wait_report: logs once that this node waits for other nodes. If it is None, nothing is logged.

        Raises:
            LaunchError: the deadline has passed, or this node cannot join for another reason.
            CancelledError: `cancel` was called.
            JobClosedError: the job is over.
            StoreLostError: the store is lost. After any other of these errors, no other node waits for this node.
        """
        if last_call is None:
            last_call = float(self._rendezvous.options.get("last_call_timeout", LAST_CALL_SECONDS))
        return self._get_implementation().join(Deadline(deadline, self._cancelled), last_call, expected_nodes, wait_report)

    def count_waiting_nodes(self) -> int:
        """Return the number of nodes that wait to join the next round. Raises StoreLostError."""
        return self._get_implementation().count_waiting_nodes()

    def set_closed(self) -> None:
        """Close the rendezvous, so that no node can join the job any more. Raises StoreLostError."""
        self.get_job_store().set(JOB_OVER_KEY, "1")  # for nodes that check it before they join
        self._get_implementation().set_closed()

    def get_job_store(self) -> PrefixedStore:
        """Return the part of the store that all rounds of the job share."""
        assert self._opened_store is not None, "call connect() first"
        return PrefixedStore(self._opened_store.connection, f"mpwatch.{self._rendezvous.run_id}")

    def _get_implementation(self) -> DynamicRendezvous | StaticRendezvous:
        assert self._implementation is not None, "call connect() first, and nothing after close()"
        return self._implementation

    def cancel(self) -> None:
        """Make `connect` and `join` raise CancelledError. Any thread may call this method.

        If `connect` or `join` is running, the running call ends within 1 s after `cancel`. If `connect` or `join` is called
        after `cancel`, the new call ends at once.
        """
        self._cancelled.set()

    def close(self) -> None:
        """Leave the round. Release all threads and sockets, and stop the store's server if this process runs the server.

        `close` takes at most 2 s, even if the network does not work. A thread that resolves a name may still run after
        `close`. The thread ends when the resolver answers or gives up.
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
    """Call `leave` on a new thread. If `leave` takes too long, shut down the connection, so that `leave` fails."""
    thread = threading.Thread(target=leave, name="mpwatch-leave", daemon=True)
    thread.start()
    thread.join(LEAVE_SECONDS)
    if thread.is_alive():
        connection.shut_down()
        thread.join(SHUTDOWN_SECONDS)
    if thread.native_id is not None and not thread.is_alive():
        wait_for_thread_exit(thread.native_id)


def wait_for_others_to_leave(has_other_nodes: Callable[[], bool]) -> None:
    """Wait until the other nodes have left, but at most OTHERS_LEAVE_SECONDS.

    If torch's server ends while another node uses the store, torch prints a page of C++ frames on the other node.
    """
    deadline = monotonic() + OTHERS_LEAVE_SECONDS
    while has_other_nodes() and monotonic() < deadline:
        time.sleep(OTHERS_LEAVE_POLL_SECONDS)
