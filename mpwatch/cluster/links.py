"""`NodeLinks` is the driver's side of the links, the TCP connections between driver and nodes.

The node's side of a link is in node.py.

thread "mpwatch driver"    accepts the connections of nodes
one more for each node     puts what the node sends into the queue of messages
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import mpwatch
from mpwatch.cluster.signed_connection import SignedConnection, limit_waits, shut_down
from mpwatch.results.rank_status import RankStatus

CLOSE_SECONDS = 5.0  # for a thread to end, which takes milliseconds
HELLO_SECONDS, MAX_STRANGERS = 10, 64  # for a program that connects to show that it knows the key, and of such programs
MAX_WAITING_OUTPUTS = 1000  # messages of each node that wait until the driver has written them; then the node waits


class NodeLinks:
    """The TCP connections between the driver and all nodes of one job.

    Args:
        address: the address of the driver.
        key: the secret of the job. A program that does not know the key cannot connect as a node.
        on_statuses: called with the number of a node and the statuses of its ranks, in the thread that reads from this node.

    Raises LaunchError if the driver cannot listen at the address.

    Attributes:
        address: the address at which the driver listens, with the port.
        messages: the kind of each message, the number of the node, and the content. The first message of a node is "hello"
            with its hostname and connection. The last message is "closed" with the connection, which the reader must pass to
            `release`.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        on_statuses: Callable[[int, Sequence[RankStatus]], None],
    ) -> None:
        self.messages: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._key, self._on_statuses = key, on_statuses
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # no thread uses a connection whose descriptor another thread has just closed
        self._connections: set[Connection] = set()
        self._strangers = 0  # that have not said "hello"
        self._output_slots: defaultdict[int, threading.Semaphore] = defaultdict(
            partial(threading.Semaphore, MAX_WAITING_OUTPUTS)
        )
        try:
            self._listener = Listener((address, 0), backlog=128)
        except OSError as error:
            text = f"the driver cannot listen at {address}, which must be an address of this machine: {error}"
            raise mpwatch.LaunchError(text) from error
        self.address: tuple[str, int] = self._listener.address
        self._start_thread(self._accept)

    def acknowledge_output(self, number: int) -> None:
        """Allow a node to send one more message of the kind "output".

        Call `acknowledge_output` once for each message of the kind "output" that you take from the queue `messages`.
        """
        self._output_slots[number].release()

    def release(self, link: SignedConnection) -> None:
        """Close the connection to a node, after the driver has taken the node's message "closed" from the queue."""
        self._close(link.connection)

    def _close(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
            connection.close()

    def close(self) -> None:
        """Close all connections, and wait until the threads have ended, at most CLOSE_SECONDS for each thread."""
        self._closed.set()
        with suppress(OSError):
            Client(self.address).close()  # this wakes the thread that accepts
        self._threads[0].join(CLOSE_SECONDS)  # it accepts; after that there are no further connections
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                shut_down(connection)
        for slots in tuple(self._output_slots.values()):
            slots.release()
        for thread in self._threads[1:]:
            thread.join(CLOSE_SECONDS)
        for connection in tuple(self._connections):
            self._close(connection)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._listener.accept()
            except OSError:  # too many open files
                self._closed.wait(0.1)
                continue
            with self._lock:
                is_welcome = self._strangers < MAX_STRANGERS
                if is_welcome:
                    self._connections.add(connection)
                    self._strangers += 1
            if is_welcome:
                self._start_thread(partial(self._receive, connection))
            else:
                connection.close()

    def _receive(self, connection: Connection) -> None:
        number = None
        try:
            limit_waits(connection, HELLO_SECONDS)
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                link = SignedConnection(connection, self._key, is_driver=True)
                _, (number, hostname) = link.recv()
            finally:
                with self._lock:
                    self._strangers -= 1
            limit_waits(connection, 0)
            self.messages.put(("hello", number, (hostname, link)))
            while not self._closed.is_set():
                kind, content = link.recv()
                if kind == "statuses":
                    self._on_statuses(number, content)
                    continue
                if kind == "output":
                    self._output_slots[number].acquire()
                self.messages.put((kind, number, content))
        except (EOFError, OSError, AuthenticationError):
            pass  # a program that does not know the key is no node
        finally:
            shut_down(connection)  # after any other error, too: the node must not wait for this thread
            if number is None:
                self._close(connection)
            else:
                self.messages.put(("closed", number, link))

    def _start_thread(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="mpwatch driver", daemon=True)
        thread.start()
        self._threads.append(thread)
