"""An engine over a rendezvous handler of torch's that somebody else has made: of a kind of his own, say, or with a store
that lives elsewhere.

The handler stays its maker's: it numbers the nodes and gives them a store for each round; how many have to come, and how
long it waits for them, it decides by its own settings. What the methods that all handlers have do not offer, is said where
it is missing. Guarantee: a meeting is waited for no longer than the node may wait; one that is still in progress when the
node leaves ends by the handler's own timeouts, on a thread of its own, and what came of it is undone.
"""

import math
import platform
import time

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
from mpwatch.multinode.rendezvous.cancellable_wait import Deadline, wait_for
from mpwatch.multinode.rendezvous.client import LEAVE_SECONDS, RendezvousClient, leave_in_time
from mpwatch.multinode.rendezvous.errors import JobClosedError, StoreLostError
from mpwatch.multinode.rendezvous.rounds import Round
from mpwatch.multinode.rendezvous.store import PrefixedStore, StoreConnection, borrowed
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.torch_private import leave_rendezvous, stop_heartbeats

NEWCOMERS = (
    ". Torch's own handlers wait so for an address that only the first node of the first round has written: for nodes that"
    " come later set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of all nodes"
)


class CustomHandlerClient(RendezvousClient):
    """See Engine.

    Args:
        rendezvous: the terms: of its endpoint, backend and options nothing is used.
        handler: by which the nodes meet. One node, one handler.
    """

    def __init__(self, rendezvous: Rendezvous, handler: RendezvousHandler) -> None:
        super().__init__(rendezvous)
        self._handler = handler
        self._connection: StoreConnection | None = None  # to the store of the round
        self._is_in = False  # a round, or has been in one
        self.backend = handler.get_backend()
        self._who = f"job {handler.get_run_id()!r}, which meets by a rendezvous handler ({self.backend})"

    def connect(self, deadline: float) -> None:
        """Nothing: the handler is. Raises CancelledError."""
        Deadline(deadline, self._cancelled).left(0)

    def join(
        self,
        deadline: float,
        *,
        last_call: float | None = None,  # noqa: ARG002  the handler has its own
        enough: float = math.inf,  # noqa: ARG002  and counts for itself
    ) -> Round:
        """See Engine; whom it waits for is the handler's affair. Whatever else it raises, this does too."""
        started, limit = time.monotonic(), Deadline(deadline, self._cancelled)
        limit.left(0)
        self._give_back()
        self._is_in = False  # if it is given up, who carries it out sees to that
        try:
            info = wait_for(self._meet, limit, "mpwatch-rendezvous", undo=lambda _: self._withdraw())
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            raise JobClosedError(
                f"{self._who}: it is closed: that job is over. Another one needs a run_id of its own"
            ) from error
        except (RendezvousTimeoutError, TimeoutError) as error:
            raise LaunchError(
                f"{self._who}: no round had formed after {time.monotonic() - started:.1f} s. Does each node of the job wait"
                " there, and are they as many as the handler wants? Its own timeouts, and join_timeout, say how long"
            ) from error
        except (RendezvousConnectionError, RendezvousStateError, DistError) as error:
            hint = NEWCOMERS if "MASTER_ADDR" in str(error) else ""
            raise StoreLostError(f"{self._who}: {error}{hint}") from error
        self._is_in = True
        return self._round(info)

    def _meet(self) -> RendezvousInfo:
        try:
            return self._handler.next_rendezvous()
        except BaseException:
            self._withdraw()  # torch's may have joined before it raises, and gives signs of life still
            raise

    def _round(self, info: RendezvousInfo) -> Round:
        silence = self._rendezvous.node_timeout / 2
        self._connection, local, self.is_host = borrowed(info.store, self._who, silence)
        self.address = self._rendezvous.local_addr or local or platform.node()
        store = PrefixedStore(self._connection, "mpwatch")
        if store.add(f"here/{info.rank}", 1) > 1:
            raise LaunchError(
                f"{self._who}: somebody has been node {info.rank} in this store before: the handler has numbered two nodes"
                " alike, or gives several rounds one store. Each round needs a store, or a prefix, of its own, as torch's"
                " dynamic rendezvous has it"
            )
        return Round(store, info.rank, info.world_size)

    def waiting(self) -> int:
        """See Engine."""
        return self._connected_to_store().guarded(self._handler.num_nodes_waiting)

    def set_closed(self) -> None:
        """See Engine."""
        self._connected_to_store().guarded(self._handler.set_closed)

    def store_of_job(self) -> None:
        """There is no store before the nodes meet."""

    def close(self) -> None:
        """Leave the round. The handler itself is its maker's to shut down, which closes it for everybody."""
        self.cancel()
        if self._is_in and self._connection is not None:
            leave_in_time(self._withdraw, self._connection)
        self._give_back()

    def _withdraw(self) -> None:
        """Have the others not wait for this node when they meet anew; there is no public way but to close it for all.

        They wait for one that has some other handler as long as that takes a silent node for a live one.
        """
        handler = self._handler
        if isinstance(handler, DynamicRendezvousHandler):
            try:
                stop_heartbeats(handler)
                leave_rendezvous(handler, LEAVE_SECONDS)
            except (RendezvousConnectionError, RendezvousStateError, RendezvousTimeoutError, DistError):
                pass  # then they will miss our signs of life

    def _connected_to_store(self) -> StoreConnection:
        assert self._connection is not None, "join() comes first, and nothing after close()"
        return self._connection

    def _give_back(self) -> None:
        if self._connection is not None:
            self._connection.give_back()
            self._connection = None
