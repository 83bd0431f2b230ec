"""`JobServer` is the server of a job on a cluster, in the driver. So it survives the loss of any node.

It runs the coordinator, and receives what the nodes send to the driver by their links (node.py): pickles, of which each was
signed with the secret of the job (nodes/frames.py) before it is loaded.
"""

import asyncio
import logging
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from mpwatch.errors import LaunchError
from mpwatch.nodes.frames import Loop
from mpwatch.nodes.json_codec import InvalidMessageError
from mpwatch.nodes.messages import AttemptDecision, LinkHello
from mpwatch.nodes.node_thread import make_coordinator
from mpwatch.nodes.server import Link, Server
from mpwatch.options.spec import WorkerSpec
from mpwatch.results.model import RankStatus
from mpwatch.watcher.observers.deferred_log import log_now
from mpwatch.wire.resource_errors import with_remedy

MAX_WAITING = 1000  # messages that wait for the driver, and what one read of a node adds; then the nodes wait


class JobServer:
    """Serves until `close`, at `port` of the driver's address. Raises LaunchError if the driver cannot listen there.

    `messages` has the kind of each message, the number of the node, and the content. The first one of a node is "hello" with
    its hostname and Link, the last one "closed" with the Link. `on_statuses` is called in the server's thread.
    """

    def __init__(
        self, address: str, spec: WorkerSpec[Any], on_statuses: Callable[[int, Sequence[RankStatus]], object]
    ) -> None:
        assert spec.rendezvous is not None
        assert spec.rendezvous.key, "pickles are loaded only if they are signed"
        self.messages: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._on_statuses = on_statuses
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
        server = Server(coordinator, self._rendezvous, partial(log_now, logging.WARNING, "%s"), driver=self)
        await server.start(listener)
        await self._is_closed.wait()
        await server.close()

    def on_decision(self, decision: AttemptDecision) -> None:
        self.messages.put(("decided", 0, decision))

    def open_link(self, hello: LinkHello, link: Link) -> Callable[[bytes | None], None]:
        self.messages.put(("hello", hello.number, (hello.hostname, link)))
        return partial(self._receive, hello.number, link)

    def is_behind(self) -> bool:
        return self.messages.qsize() >= MAX_WAITING

    def _receive(self, number: int, link: Link, data: bytes | None) -> None:
        if data is None:
            self.messages.put(("closed", number, link))
            return
        try:
            kind, content = pickle.loads(data)
        except Exception as error:  # the node's modules may differ from those here
            raise InvalidMessageError(f"{type(error).__name__}: {error}") from error
        if kind == "statuses":
            self._on_statuses(number, content)
        else:
            self.messages.put((kind, number, content))
