"""`JobServer` is the server of a job on a cluster, in the driver. So it survives the loss of any node."""

import asyncio
import logging
import queue
import socket
import threading
from contextlib import closing
from functools import partial
from typing import Any

from mpwatch.errors import LaunchError
from mpwatch.nodes.frames import Loop
from mpwatch.nodes.node_thread import make_coordinator
from mpwatch.nodes.server import Server
from mpwatch.options.spec import WorkerSpec
from mpwatch.watcher.log import log_now
from mpwatch.wire.resource_errors import with_remedy


class JobServer:
    """Serves until `close`, at `port` of the driver's address. Raises LaunchError if the driver cannot listen there.

    It runs the coordinator, and puts into `messages` what the nodes send to the driver by their links, see nodes/server.py:
    pickles, of which each was signed with the secret of the job before it is loaded.
    """

    def __init__(self, address: str, spec: WorkerSpec[Any]) -> None:
        assert spec.rendezvous is not None
        assert spec.rendezvous.key, "pickles are loaded only if they are signed"
        self.messages: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            text = f"the driver cannot listen at {address}, which must be an address of this machine: {error}"
            raise LaunchError(text) from error
        self.port: int = listener.getsockname()[1]
        self._spec, self._rendezvous = spec, spec.rendezvous
        self._loop = Loop()
        self._is_closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="mpwatch-coordinator", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            listener.close()
            self._loop.close()
            raise LaunchError(with_remedy("the thread that serves the nodes cannot be started", error)) from error

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_closed.set)
        self._thread.join()

    # ---- in the server's thread

    def _run(self, listener: socket.socket) -> None:
        with closing(self._loop):
            self._loop.run_until_complete(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        coordinator = make_coordinator(self._spec, has_own_node=False)
        server = Server(coordinator, self._rendezvous, partial(log_now, logging.WARNING, "%s"), self.messages)
        await server.start(listener)
        await self._is_closed.wait()
        await server.close()
