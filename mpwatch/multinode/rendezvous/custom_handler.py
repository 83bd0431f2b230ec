"""A RendezvousClient that uses a torch RendezvousHandler of the user, for `Agent(..., rdzv_handler=...)`.

The user makes the handler and shuts it down. For each round, the handler gives every node a group rank and a store. The
settings of the handler say how many nodes must join and how long the handler waits.

`CustomHandlerClient.join` guarantees that this node does not wait for the handler after the deadline. A separate thread
calls the handler, and this call may end after the deadline. If torch's dynamic rendezvous handler joins a round after the
deadline, this node leaves the round at once.
"""

import math
import platform

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from mpwatch.errors import LaunchError
from mpwatch.multinode.rendezvous.cancellable_wait import Deadline, call_with_deadline
from mpwatch.multinode.rendezvous.client import (
    LEAVE_SECONDS,
    RendezvousClient,
    leave_within_limit,
    wait_for_others_to_leave,
)
from mpwatch.multinode.rendezvous.errors import JobClosedError, StoreLostError
from mpwatch.multinode.rendezvous.rounds import Round, WaitReport
from mpwatch.multinode.rendezvous.store import PrefixedStore, StoreConnection, wrap_store
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.os_support.clock import monotonic
from mpwatch.torch_private import leave_rendezvous, stop_heartbeats

LATE_JOIN_HINT = (
    ". Torch's own handlers wait like this for an address that only the first node of the first round has written. To let"
    " nodes join later, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of all nodes"
)


class CustomHandlerClient(RendezvousClient):
    """Represents one node in the rendezvous of one job, and uses the user's rendezvous handler. See RendezvousClient.

    Args:
        rendezvous: the options. Endpoint, backend and backend options are not used.
        handler: the user's handler. Each node has another handler object.
    """

    def __init__(self, rendezvous: Rendezvous, handler: RendezvousHandler) -> None:
        super().__init__(rendezvous)
        self._handler = handler
        self._connection: StoreConnection | None = None  # the connection to the store of the round
        self._has_joined = False
        self._round: Round | None = None  # the latest round
        self.backend = handler.get_backend()
        self._description = f"job {handler.get_run_id()!r}, which meets by a rendezvous handler ({self.backend})"

    def connect(self, deadline: float) -> None:
        """Do nothing, because the handler is connected already. Raises CancelledError."""
        Deadline(deadline, self._cancelled).seconds_left(0)

    def join(
        self,
        deadline: float,
        *,
        last_call: float | None = None,  # noqa: ARG002  the handler has its own
        expected_nodes: float = math.inf,  # noqa: ARG002  the handler counts the nodes itself
        wait_report: WaitReport | None = None,  # noqa: ARG002  how many nodes the handler waits for is not known
    ) -> Round:
        """See RendezvousClient. The handler decides for how many nodes it waits.

        `join` converts only torch's exceptions and TimeoutError. If the handler raises, for example, ValueError, `join`
        raises the same ValueError.
        """
        started_at, limit = monotonic(), Deadline(deadline, self._cancelled)
        limit.seconds_left(0)
        self._release_connection()
        self._has_joined = False  # if the call is abandoned, its thread leaves the round
        try:
            info = call_with_deadline(
                self._next_rendezvous, limit, "mpwatch-rendezvous", undo=lambda _: self._leave_rendezvous()
            )
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            raise JobClosedError(
                f"{self._description}: it is closed: that job is over. A new job needs a run_id of its own"
            ) from error
        except (RendezvousTimeoutError, TimeoutError) as error:
            raise LaunchError(
                f"{self._description}: no round had formed after {monotonic() - started_at:.1f} s. Check that each node"
                " of the job waits there, and that there are as many nodes as the handler requires. The handler's own"
                " timeouts and join_timeout set the time"
            ) from error
        except (RendezvousConnectionError, RendezvousStateError, DistError) as error:
            hint = LATE_JOIN_HINT if "MASTER_ADDR" in str(error) else ""
            raise StoreLostError(f"{self._description}: {error}{hint}") from error
        self._has_joined = True
        return self._make_round(info)

    def _next_rendezvous(self) -> RendezvousInfo:
        try:
            return self._handler.next_rendezvous()
        except BaseException:
            self._leave_rendezvous()  # torch's handler may have joined before it raised, and still send heartbeats
            raise

    def _make_round(self, info: RendezvousInfo) -> Round:
        silence_timeout = self._rendezvous.node_timeout / 2
        self._connection, local_addr, self.is_host = wrap_store(info.store, self._description, silence_timeout)
        self.address = self._rendezvous.local_addr or local_addr or platform.node()
        store = PrefixedStore(self._connection, "mpwatch")
        if store.add(f"here/{info.rank}", 1) > 1:
            raise LaunchError(
                f"{self._description}: another node {info.rank} has used this store before. The handler has given two nodes"
                " the same rank, or has given several rounds the same store. Each round needs its own store or prefix, as in"
                " torch's dynamic rendezvous"
            )
        self._round = Round(store, info.rank, info.world_size)
        return self._round

    def count_waiting_nodes(self) -> int:
        """See RendezvousClient."""
        return self._get_connection().call(self._handler.num_nodes_waiting)

    def set_closed(self) -> None:
        """See RendezvousClient."""
        self._get_connection().call(self._handler.set_closed)

    def get_job_store(self) -> None:
        """Return None, because there is no store before the first round."""

    def close(self) -> None:
        """Leave the round. The handler stays open, because after its shutdown no node could join any more."""
        self.cancel()
        if self._has_joined and self._connection is not None:
            leave_within_limit(self._leave, self._connection)
            if self.is_host and self._round is not None:
                wait_for_others_to_leave(self._round.has_other_nodes)
        self._release_connection()

    def _leave(self) -> None:
        self._leave_rendezvous()
        if self._round is not None:
            self._round.mark_as_left()

    def _leave_rendezvous(self) -> None:
        """Leave torch's dynamic rendezvous, so that the other nodes do not wait for this node when they form the next round.

        torch has no public method that removes one node without closing the rendezvous for all nodes. If the user's handler
        is not a DynamicRendezvousHandler, the other nodes wait until their handlers count this node as lost.
        """
        handler = self._handler
        if isinstance(handler, DynamicRendezvousHandler):
            try:
                stop_heartbeats(handler)
                leave_rendezvous(handler, LEAVE_SECONDS)
            except (RendezvousConnectionError, RendezvousStateError, RendezvousTimeoutError, DistError):
                pass  # the other nodes will then miss its heartbeats

    def _get_connection(self) -> StoreConnection:
        assert self._connection is not None, "call join() first, and nothing after close()"
        return self._connection

    def _release_connection(self) -> None:
        if self._connection is not None:
            self._connection.release()
            self._connection = None
