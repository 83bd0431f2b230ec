"""An `Engine` starts nodes, a `NodeOutcome` is what a node returns, and `ThreadEngine` is an example of an engine."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import mpwatch
from mpwatch.wire.pickling.pickler import pack_by_value


class Engine(Protocol):
    """Starts functions on nodes. The driver's thread calls the methods.

    An engine may also have two other methods:

    - `describe_wait() -> str` returns what the job waits for, such as "the cluster has 1 free node for 2 nodes of the job".
      The driver starts the nodes when it returns "", and shows the text in warnings and errors. When the nodes have been
      started, the text says why none of them has begun. Then the method returns at once.
    - `lacks_room(number: int) -> bool` returns at once whether the cluster has no room for this node at present. A job of
      (min, max) nodes then does not wait for that node before it begins.

    Attributes:
        address: the driver's own address, to which the nodes connect.
    """

    address: str

    def start(self, call: "Callable[[], NodeOutcome]", number: int) -> "Future[NodeOutcome]":
        """Execute `call()` once, in a process on a node of its own. Return a future of the outcome.

        If no node is free now, the call waits for a node. If the engine loses the node or the process, the future gets an
        exception. The driver waits without limit for the outcome of a node that has ended, since large results take their
        time. So the engine must notice that an outcome will not come.

        cloudpickle can pickle `call`. This method returns at once.

        Args:
            call: what the node does.
            number: the number of the node, from 0. A node that takes the place of a lost one has the next number.
        """

    def cancel(self, number: int) -> None:
        """End the call of this node at once, or do not begin it. Do nothing if it has ended."""

    def close(self) -> None:
        """End all that is left, and release what the engine holds of the cluster."""


@dataclass(frozen=True)
class NodeOutcome:
    """The result of a node, or the error that `mpwatch.run` has raised there. cloudpickle pickles it.

    Classes of the driver's program come back as the same classes, since the same cloudpickle has sent them. Large arrays are
    beside the pickle, so that an engine need not copy them.
    """

    data: bytes
    buffers: list[pickle.PickleBuffer]

    @classmethod
    def pack(cls, result: "mpwatch.RunResult[Any] | Exception") -> "NodeOutcome":
        """Pickle a result or an error. If it cannot be pickled, pickle a LaunchError that says so."""
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
        """Return the result or the error. Its arrays can be written to, as in a result of `mpwatch.run`."""
        buffers = [bytearray(b) if memoryview(b).readonly else b for b in self.buffers]  # an engine may have shared memory
        outcome: mpwatch.RunResult[Any] | Exception = pickle.loads(self.data, buffers=buffers)
        return outcome


class ThreadEngine:
    """An example of an engine, whose nodes are threads of this process. It is for tests and for first tries."""

    def __init__(self) -> None:
        self.address = "127.0.0.1"
        self._executor = ThreadPoolExecutor(64, thread_name_prefix="mpwatch node")
        self._futures: dict[int, Future[NodeOutcome]] = {}

    def start(self, call: Callable[[], NodeOutcome], number: int) -> Future[NodeOutcome]:
        """Execute the call in a thread of its own."""
        self._futures[number] = self._executor.submit(call)
        return self._futures[number]

    def cancel(self, number: int) -> None:
        """Cancel the call if it has not begun. A thread that runs it ends when the driver closes the node's connection."""
        self._futures[number].cancel()

    def close(self) -> None:
        """Wait for all threads."""
        self._executor.shutdown(cancel_futures=True)
