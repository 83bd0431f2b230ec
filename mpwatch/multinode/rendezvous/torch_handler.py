"""Torch's rendezvous handlers, as this package wants them: what they do on their own here, and what they leave alone.

Torch's handler opens a store for the trainers on the first node of a round, and has all others wait for its address, for
minutes and in C++. Ours get a fresh one for each attempt, so nothing of that happens. Torch looks once a second whether a
round has formed; ours looks sooner, as long as it has not waited for long. Of torch, imports its elastic part alone.
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
from mpwatch.os_support.processes import await_end_of_thread
from mpwatch.torch_private import (
    _Action,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _NodeDescGenerator,
    _RendezvousContext,
    stop_heartbeats,
)

BEATS = 3  # without which a node is dropped
CLOSE_SECONDS = 5.0  # to close the rendezvous, should many others write at the same time
LOOK_SHARE = 0.1  # of the time that a node has waited for a round: when it looks again, within these bounds
LEAST_LOOK, MOST_LOOK = 0.05, 1.0  # seconds; torch has the latter
MOST_LOOKS = 100  # a second, of all nodes together: each reads what there is of all of them
ID_BITS = 62  # whoever reads it may have no more than 64, and a sign


class JoinTimeouts(RendezvousTimeout):
    """Torch's timeouts, of the join that is in progress: they differ from one to the next."""

    def __init__(self, seconds: float) -> None:
        super().__init__(close=timedelta(seconds=CLOSE_SECONDS), heartbeat=timedelta(seconds=seconds))
        self.deadline = 0.0
        self.seconds_of_last_call = 0.0

    @property
    def join(self) -> timedelta:
        """What is left of it: torch may begin to count anew."""
        return timedelta(seconds=max(0.0, self.deadline - time.monotonic()))

    @property
    def last_call(self) -> timedelta:
        """How long a round that has enough nodes waits for more."""
        return timedelta(seconds=self.seconds_of_last_call)


class _NodeIdGenerator(_NodeDescGenerator):
    """Names nodes. By address and pid alone they would be the same for two containers of one machine, which number their
    processes each for itself.
    """

    def generate(self, local_addr: str | None = None) -> Node:
        return Node(local_addr or "", os.getpid(), secrets.randbits(ID_BITS))


class _Executor(_DistributedRendezvousOpExecutor):
    """Torch's, which does what torch decides, but does not sleep for a second when that is to wait."""

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        began = time.monotonic()

        def decide(context: _RendezvousContext, deadline: float) -> _Action:
            while (action := state_handler(context, deadline)) is _Action.SYNC:
                time.sleep(pause(time.monotonic() - began, len(self._state.last_heartbeats)))
                self._state_holder.sync()
                self._state = self._state_holder.state
                context = _RendezvousContext(self._node, self._state, self._settings)
            return action

        super().run(decide, deadline, update_deadline)


def pause(waited: float, nodes: int) -> float:
    """Seconds until a node looks again: nobody who has waited for long minds to wait for a tenth of that."""
    return min(MOST_LOOK, max(LEAST_LOOK, LOOK_SHARE * waited, nodes / MOST_LOOKS))


class Handler(DynamicRendezvousHandler):
    """Torch's, without a store for the trainers, and silent about signs of life that could not be given."""

    _node_desc_generator = _NodeIdGenerator()

    def __init__(self, node: Node, settings: Any, backend_name: str, store: Store, state_holder: Any) -> None:
        super().__init__(node, settings, backend_name, store, state_holder)
        state_holder._cache_duration = 0  # who looks wants to know what is there now, and not a second ago
        self._op_executor = _Executor(node, state_holder, settings)

    @property
    def node(self) -> Node:
        """What this node is called in the state."""
        return self._this_node

    def stop(self) -> None:
        """No more signs of life. Waits for the thread that gives them, until the kernel has forgotten it."""
        thread = stop_heartbeats(self)
        if thread is not None and thread.native_id is not None:
            await_end_of_thread(thread.native_id)

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:  # noqa: ARG002
        return SimpleNamespace(port=1)  # any but 0, for which torch would look for one

    def _keep_alive(self) -> None:
        try:
            super()._keep_alive()
        except StoreLostError:  # the next call that somebody waits for raises it too
            return


class _NullStore(Store):
    """Where torch's handler writes down, and finds, the store for the trainers that there is not."""

    def set(self, key: str, value: str) -> None:
        """Forget it."""

    def get(self, key: str) -> bytes:  # noqa: ARG002
        """A number, for the port."""
        return b"1"


NOWHERE = _NullStore()


def make_handler(rendezvous: Rendezvous, backend: Any, address: str, terms: JoinTimeouts) -> Handler:
    """Torch's handler, over a backend, by the terms of this job."""
    settings = RendezvousSettings(
        rendezvous.run_id,
        rendezvous.min_nodes,
        rendezvous.max_nodes,
        terms,
        keep_alive_interval=timedelta(seconds=rendezvous.node_timeout / BEATS),
        keep_alive_max_attempt=BEATS,
    )
    holder = _BackendRendezvousStateHolder(backend, settings)
    node = Handler._node_desc_generator.generate(address)
    return Handler(node, settings, backend.name, NOWHERE, holder)
