"""`JobServer` is the server of a job on a cluster, in the driver. So it survives the loss of any node."""

import socket
from collections.abc import Callable
from typing import Any

from mpwatch.errors import LaunchError
from mpwatch.nodes.messages import RestartHistory
from mpwatch.nodes.node_thread import make_coordinator
from mpwatch.nodes.server import Server
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.clock import monotonic


class JobServer:
    """Runs the coordinator until `close`.

    Args:
        address: of the driver.
        spec: the options of the job.
        log_warning: called in the server's thread.

    Attributes:
        port: at which the nodes connect.
    """

    def __init__(self, address: str, spec: WorkerSpec[Any], log_warning: Callable[[str], object]) -> None:
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
            log_warning=log_warning,
            keeps_open=True,
        )
        self.port: int = listener.getsockname()[1]
        self._server.start()

    def continue_with(self, history: RestartHistory) -> None:
        """All nodes were lost, but new ones will come, and go on with this history."""

        def go_on() -> list[Any]:
            self._coordinator.continue_with(history)
            return []

        self._server.post(go_on)

    def expect_nodes(self, count: int) -> None:
        """Let the ranks start as soon as so many nodes have joined."""
        self._server.post(lambda: self._coordinator.expect_nodes(count, monotonic()))

    def close(self) -> None:
        """End the server, and all connections of nodes."""
        self._server.close()
