"""Torch's dynamic rendezvous handler, with a few changes.

- In each round, torch's handler on the first node opens a store for the ranks of all nodes. On the other nodes, torch's C++
  code may wait for minutes until it gets the address of the ranks' store. mpwatch's handler opens no store for the ranks,
  because mpwatch gives the ranks a new store for each attempt.
- torch's handler polls the state once a second until a round has formed. mpwatch's handler polls the state several times in
  the first second. The longer mpwatch's handler has waited, the longer it sleeps between two polls, up to 1 s.
- torch's handler uses the same timeouts for all joins. mpwatch's handler gets new timeouts for each join.
- If a heartbeat fails because the store is lost, torch's handler logs a warning. mpwatch's handler logs nothing.
"""

import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)

from mpwatch.multinode.rendezvous.errors import StoreLostError
from mpwatch.multinode.rendezvous.torch_state import Node
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.torch_private import (
    _Action,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _NodeDescGenerator,
    _RendezvousContext,
    stop_heartbeats,
)

MISSED_HEARTBEATS = 3  # after this number of missed heartbeats torch removes a node
CLOSE_SECONDS = 5.0  # to close the rendezvous while many other nodes write at the same time
POLL_SHARE = 0.1  # a node's polling interval is this part of the time that it has waited, within these bounds
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.05, 1.0  # torch always waits 1 s
MAX_POLLS_PER_SECOND = 100  # of all nodes together, since each poll reads the state of all nodes
ID_BITS = 62  # a reader of the state may keep only 64 bits with a sign


class JoinTimeouts(RendezvousTimeout):
    """torch's timeouts. DynamicRendezvous sets `deadline` and `last_call_seconds` before each join."""

    def __init__(self, heartbeat_seconds: float) -> None:
        super().__init__(close=timedelta(seconds=CLOSE_SECONDS), heartbeat=timedelta(seconds=heartbeat_seconds))
        self.deadline = 0.0
        self.last_call_seconds = 0.0

    @property
    def join(self) -> timedelta:
        """The time that is left until the deadline of the join."""
        return timedelta(seconds=max(0.0, self.deadline - monotonic()))

    @property
    def last_call(self) -> timedelta:
        """The time for which a round waits for more nodes after the minimum number of nodes has joined."""
        return timedelta(seconds=self.last_call_seconds)


class _NodeIdGenerator(_NodeDescGenerator):
    """Makes the id of a node from its address, its pid and a random number.

    Without the random number, two nodes in containers of one machine could have the same id.
    """

    def generate(self, local_addr: str | None = None) -> Node:
        return Node(local_addr or "", os.getpid(), secrets.randbits(ID_BITS))


class _Executor(_DistributedRendezvousOpExecutor):
    """Executes rendezvous operations like its base class, but sleeps for `poll_interval` seconds between polls.

    The base class, which is torch's own executor, sleeps for 1 s between polls.
    """

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        started_at = monotonic()

        def decide(context: _RendezvousContext, deadline: float) -> _Action:
            while (action := state_handler(context, deadline)) is _Action.SYNC:
                time.sleep(poll_interval(monotonic() - started_at, len(self._state.last_heartbeats)))
                self._state_holder.sync()
                self._state = self._state_holder.state
                context = _RendezvousContext(self._node, self._state, self._settings)
            return action

        super().run(decide, deadline, update_deadline)


def poll_interval(waited: float, node_count: int) -> float:
    """Return the number of seconds after which a node polls the state again."""
    return min(MAX_POLL_SECONDS, max(MIN_POLL_SECONDS, POLL_SHARE * waited, node_count / MAX_POLLS_PER_SECOND))


class Handler(DynamicRendezvousHandler):
    """torch's handler, with the changes that the module's docstring lists."""

    _node_desc_generator = _NodeIdGenerator()

    def __init__(self, node: Node, settings: Any, backend_name: str, store: Store, state_holder: Any) -> None:
        super().__init__(node, settings, backend_name, store, state_holder)
        state_holder._cache_duration = 0  # a poll must return the present state, and not a state that is a second old
        self._op_executor = _Executor(node, state_holder, settings)

    @property
    def node(self) -> Node:
        """The id of this node in the rendezvous state."""
        return self._this_node

    def stop_heartbeats(self) -> None:
        """Stop the heartbeats, and wait until the kernel has removed the thread that sent them."""
        thread = stop_heartbeats(self)
        if thread is not None and thread.native_id is not None:
            wait_for_thread_exit(thread.native_id)

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:  # noqa: ARG002
        return SimpleNamespace(port=1)  # any port except 0, with which torch would search for a free port

    def _keep_alive(self) -> None:
        try:
            super()._keep_alive()
        except StoreLostError:  # the next call of the node thread raises it, too
            return


class _NullStore(Store):
    """A store that keeps no values, because mpwatch does not use the values that torch's handler writes."""

    def set(self, key: str, value: str) -> None:
        """Ignore the value."""

    def get(self, key: str) -> bytes:  # noqa: ARG002
        """Return b"1" for every key. torch reads a port number from the store, and fails if the value is not a number."""
        return b"1"


NULL_STORE = _NullStore()


def make_handler(rendezvous: Rendezvous, backend: Any, address: str, timeouts: JoinTimeouts) -> Handler:
    """Make torch's handler with this backend and the options of this job."""
    settings = RendezvousSettings(
        rendezvous.run_id,
        rendezvous.min_nodes,
        rendezvous.max_nodes,
        timeouts,
        keep_alive_interval=timedelta(seconds=rendezvous.node_timeout / MISSED_HEARTBEATS),
        keep_alive_max_attempt=MISSED_HEARTBEATS,
    )
    holder = _BackendRendezvousStateHolder(backend, settings)
    node = Handler._node_desc_generator.generate(address)
    return Handler(node, settings, backend.name, NULL_STORE, holder)
