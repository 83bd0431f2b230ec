"""An `Engine` starts nodes, a `NodeOutcome` is what a node returns, and `ThreadEngine` is an example of an engine."""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import mpwatch
from mpwatch.wire.pickling.pickler import pack_by_value


class Engine(Protocol):
    """Starts functions on nodes. The thread that runs the driver calls the methods of an engine.

    An engine may also have a method `describe_wait() -> str`. It returns a text that says what the job waits for, such as
    "the cluster has 1 free node, but the job needs 2", which warnings and errors contain. The driver starts nodes as soon
    as the text is empty. After that, `describe_wait` must return at once, and an empty text stands for "no node of the job
    has connected to this program".

    An engine may also have an attribute `stop_signals`: the signals to the processes of the nodes that request a stop, see
    `mpwatch.StopPolicy`. Then `start` must execute `call()` in the main thread of a process.

    Attributes:
        address: the driver's own address, to which the nodes connect.
    """

    address: str

    def start(self, call: "Callable[[], NodeOutcome]", number: int) -> "Future[NodeOutcome]":
        """Execute `call()` once, in a process on a free node. Return a Future for the return value of `call()`.

        A node is free if it executes no other call. If no node is free, the engine must execute `call()` later. If the
        engine loses the node, the process or the return value of `call()`, the engine must store an exception of any class
        in the Future. The driver can wait forever if the Future gets neither a value nor an exception.

        cloudpickle can pickle `call`. `start` must return at once, before `call()` has returned.

        Args:
            call: what the node does.
            number: the number of the node, from 0. A new node that replaces a lost node has the next number.
        """

    def cancel(self, number: int) -> None:
        """End the call of node `number` at once. If the call has not begun, remove it.

        If the call has ended, do nothing.
        """

    def close(self) -> None:
        """End all calls, and release everything that the engine has reserved in the cluster."""


@dataclass(frozen=True)
class NodeOutcome:
    """The result of a node, or the error that `mpwatch.run` has raised on the node. cloudpickle can pickle a NodeOutcome.

    A node can return objects of classes that the driver's program defines. In the driver, a returned object is an
    instance of the original class, not of a copy of the class. A NodeOutcome keeps large arrays outside its pickle, so that
    an engine need not copy these arrays.
    """

    data: bytes
    buffers: list[pickle.PickleBuffer]

    @classmethod
    def pack(cls, result: "mpwatch.RunResult[Any] | Exception") -> "NodeOutcome":
        """Pickle a node's result or error. If the result or error cannot be pickled, pickle a LaunchError that says why."""
        buffers: list[pickle.PickleBuffer] = []
        try:
            return cls(pack_by_value(result, buffers.append), buffers)
        except Exception as error:  # noqa: BLE001  values of users
            text = f"what this node returns cannot be sent to the driver: {type(error).__name__}: {error}"
            return cls.pack(mpwatch.LaunchError(text))

    def unpack(self) -> "mpwatch.RunResult[Any] | Exception":
        """Unpickle the result or the error of a node. The arrays in the unpickled result are writable."""
        buffers = [bytearray(b) if memoryview(b).readonly else b for b in self.buffers]  # an engine may have shared memory
        outcome: mpwatch.RunResult[Any] | Exception = pickle.loads(self.data, buffers=buffers)
        return outcome


class ThreadEngine:
    """An example of an engine, whose nodes are threads of this process. Use ThreadEngine for tests and first experiments.

    It is also a base class for engines such as that for Ray. Their `start` passes a function to this one that makes the
    cluster system execute the call, and waits for its return value.
    """

    def __init__(self) -> None:
        self.address = "127.0.0.1"
        self._futures: dict[int, Future[NodeOutcome]] = {}
        self._threads: list[threading.Thread] = []

    def start(self, call: Callable[[], NodeOutcome], number: int) -> Future[NodeOutcome]:
        """Execute the call in a separate thread, which is a daemon: it does not keep the program from ending."""
        future = self._futures[number] = Future[NodeOutcome]()
        future.set_running_or_notify_cancel()  # so its `cancel` does nothing
        thread = threading.Thread(target=_execute, args=(call, future), name=f"mpwatch node {number}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return future

    def cancel(self, number: int) -> None:
        """Do nothing: the call ends when the driver closes the node's connection."""

    def close(self) -> None:
        """Wait for all threads."""
        for thread in self._threads:
            thread.join()


def _execute(call: Callable[[], NodeOutcome], future: Future[NodeOutcome]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001  of any class
        future.set_exception(error)
