"""`JobServer` is the server of a job on a cluster, in the driver. So it survives the loss of any node."""

import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from mpwatch.errors import LaunchError
from mpwatch.nodes.coordinator import Decided
from mpwatch.nodes.node_thread import make_coordinator
from mpwatch.nodes.server import Server
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.clock import monotonic
from mpwatch.watcher.observers.deferred_log import log_now


class JobServer:
    """Runs the coordinator until `close`, at `port` of the driver's address. `on_decision` is called in its thread."""

    def __init__(self, address: str, spec: WorkerSpec[Any], on_decision: Callable[[Decided], object]) -> None:
        assert spec.rendezvous is not None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            text = f"the driver cannot listen at {address}, which must be an address of this machine: {error}"
            raise LaunchError(text) from error
        self._coordinator = make_coordinator(spec, has_own_node=False)
        self._server = Server(
            listener,
            self._coordinator,
            secret=spec.rendezvous.key,
            node_timeout=spec.rendezvous.node_timeout,
            log_warning=partial(log_now, logging.WARNING, "%s"),
            on_decision=on_decision,
        )
        self.port: int = listener.getsockname()[1]
        self._server.start()

    def expect_nodes(self, count: int) -> None:
        """Let the ranks start as soon as so many nodes have joined."""
        self._server.post(lambda: self._coordinator.expect_nodes(count, monotonic()))

    def close(self) -> None:
        self._server.close()
