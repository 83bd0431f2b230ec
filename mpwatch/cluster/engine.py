"""`Engine`: what starts nodes; `NodeOutcome`: what a node returns; `ThreadEngine`: an example of an engine."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import mpwatch
from mpwatch.wire.pickling.pickler import pack_by_value


class Engine(Protocol):
    """Starts functions on nodes. The driver's thread calls the methods.

    An engine may also have the method `lacks_room(number: int) -> bool`. It returns at once whether the cluster has no room
    for this node at present. A job of (min, max) nodes then does not wait for that node before it begins.

    Attributes:
        address: the driver's own address, to which the nodes connect.
    """

    address: str

    def start(self, call: "Callable[[], NodeOutcome]", number: int) -> "Future[NodeOutcome]":
        """Have `call()` executed once, in a process on a node of its own.

        If there is no node for it now, it waits for one. If the engine loses the node or the process, the future gets an
        exception. The driver waits without limit for the outcome of a node that has ended, since large results take their
        time. So the engine must notice that an outcome will not come.

        The call can be pickled by cloudpickle. `start` returns at once, except that the first call may wait until the
        cluster has room for the job, and raise LaunchError.

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
    """What became of a node: its result, or the error that `mpwatch.run` has raised there. Pickled by cloudpickle.

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
        """Return the result or the error. Arrays can be written to, as those of `mpwatch.run`."""
        buffers = [bytearray(b) if memoryview(b).readonly else b for b in self.buffers]  # an engine may have shared memory
        outcome: mpwatch.RunResult[Any] | Exception = pickle.loads(self.data, buffers=buffers)
        return outcome


class ThreadEngine:
    """Nodes that are threads of this process: an example of an engine, for tests and for trying things out."""

    def __init__(self) -> None:
        self.address = "127.0.0.1"
        self._executor = ThreadPoolExecutor(64, thread_name_prefix="mpwatch node")
        self._futures: dict[int, Future[NodeOutcome]] = {}

    def start(self, call: Callable[[], NodeOutcome], number: int) -> Future[NodeOutcome]:
        """Call it in a thread of its own."""
        self._futures[number] = self._executor.submit(call)
        return self._futures[number]

    def cancel(self, number: int) -> None:
        """A thread cannot be ended from outside: it ends when the driver closes its link."""
        self._futures[number].cancel()

    def close(self) -> None:
        """Wait for all threads."""
        self._executor.shutdown(cancel_futures=True)
