"""An `Engine` starts nodes, a `NodeOutcome` is what a node returns, and `ThreadEngine` is an example of an engine."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import mpwatch
from mpwatch.wire.pickling.pickler import pack_by_value


class Engine(Protocol):
    """Starts functions on nodes. The driver's thread calls the methods of an engine.

    An engine may also have two other methods:

    - `describe_wait() -> str` returns what the job waits for, such as "the cluster has 1 free node for 2 nodes of the job".
      The driver starts the nodes when `describe_wait` returns "", and shows any other text in warnings and errors. After the
      start of the nodes, `describe_wait` must return at once. It may then return "", and the driver shows a text of its own.
    - `lacks_room(number: int) -> bool` returns True if the cluster has no room for this node at present. This method returns
      at once. If `lacks_room` returns True, a job with `nodes=(min, max)` can begin without this node.

    Attributes:
        address: the driver's own address, to which the nodes connect.
    """

    address: str

    def start(self, call: "Callable[[], NodeOutcome]", number: int) -> "Future[NodeOutcome]":
        """Execute `call()` once, in a process on a node of its own. Return a future of the outcome.

        If no node is free now, `call` is executed later. If the engine loses the node or the process, the future gets an
        exception. The driver waits without limit for the outcome of a node that has ended, because large results take time.
        So the engine must notice when an outcome is lost.

        cloudpickle can pickle `call`. This method returns at once.

        Args:
            call: what the node does.
            number: the number of the node, from 0. A node that takes the place of a lost one has the next number.
        """

    def cancel(self, number: int) -> None:
        """End the call of this node at once, or remove the call if it has not begun. If the call has ended, do nothing."""

    def close(self) -> None:
        """End all calls, and release all resources of the cluster that the engine holds."""


@dataclass(frozen=True)
class NodeOutcome:
    """The result of a node, or the error that `mpwatch.run` has raised on the node. cloudpickle can pickle a NodeOutcome.

    An object whose class is defined in the driver's program has the same class when it comes back, because cloudpickle
    recognizes the classes that it has sent. Large arrays are kept outside the pickle, so that an engine need not copy them.
    """

    data: bytes
    buffers: list[pickle.PickleBuffer]

    @classmethod
    def pack(cls, result: "mpwatch.RunResult[Any] | Exception") -> "NodeOutcome":
        """Pickle a result or an error. If this fails, pickle a LaunchError that says why."""
        try:
            return cls._pack(result)
        except Exception as error:  # noqa: BLE001  values of users
            text = f"what this node returns cannot be sent to the driver: {type(error).__name__}: {error}"
            return cls._pack(mpwatch.LaunchError(text))

    @classmethod
    def _pack(cls, result: "mpwatch.RunResult[Any] | Exception") -> "NodeOutcome":
        buffers: list[pickle.PickleBuffer] = []
        data = pack_by_value(result, buffers.append)
        return cls(data, buffers)

    def unpack(self) -> "mpwatch.RunResult[Any] | Exception":
        """Return the result or the error. Arrays in the result are writable, as after `mpwatch.run`."""
        buffers = [bytearray(b) if memoryview(b).readonly else b for b in self.buffers]  # an engine may have shared memory
        outcome: mpwatch.RunResult[Any] | Exception = pickle.loads(self.data, buffers=buffers)
        return outcome


class ThreadEngine:
    """An example of an engine, whose nodes are threads of this process. This engine is for tests and for first tries."""

    def __init__(self) -> None:
        self.address = "127.0.0.1"
        self._executor = ThreadPoolExecutor(64, thread_name_prefix="mpwatch node")
        self._futures: dict[int, Future[NodeOutcome]] = {}

    def start(self, call: Callable[[], NodeOutcome], number: int) -> Future[NodeOutcome]:
        """Execute the call in a thread of its own."""
        self._futures[number] = self._executor.submit(call)
        return self._futures[number]

    def cancel(self, number: int) -> None:
        """Cancel the call if it has not begun. Otherwise the call ends when the driver closes the node's connection."""
        self._futures[number].cancel()

    def close(self) -> None:
        """Wait for all threads."""
        self._executor.shutdown(cancel_futures=True)
