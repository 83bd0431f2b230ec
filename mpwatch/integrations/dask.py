"""Run one job on the workers of a Dask cluster, with one call: `mpwatch.integrations.dask.run(client, train, 4, nodes=2)`.

mpwatch/cluster/__init__.py describes how the driver and the nodes work together. This module starts each node as a Dask task
that is bound to one Dask worker. The task runs in a thread of the worker, so the worker can still send heartbeats to Dask.
The task does not call Dask's `secede`, because Dask would then count the thread of the task as free.

If a Dask worker is lost, Dask does not report the loss, but waits until the worker comes back. To notice a lost worker,
DaskEngine asks Dask every second for the list of workers.
"""

import asyncio
import logging
import pickle
import secrets
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, Unpack

import cloudpickle
from distributed import Client, Worker, get_worker
from distributed.comm import get_address_host
from distributed.utils import get_ip

import mpwatch
from mpwatch import cluster

__all__ = ["run"]

T = TypeVar("T")
POLL_SECONDS = 1.0  # between two looks at the list of workers
END_SECONDS = 15.0  # for a node to end when it has lost the driver
END_POLL_SECONDS = 0.1
SYNC_SECONDS = 10.0  # for the scheduler to answer
logger = logging.getLogger("mpwatch")


def run(
    client: Client,
    fn: Callable[..., T],
    nprocs: int | Literal["auto", "cpu", "gpu"],
    *,
    nodes: int | tuple[int, int],
    workers: Collection[str] | None = None,
    resources: Mapping[str, float] | None = None,
    address: str | None = None,
    **options: Unpack[cluster.JobOptions],
) -> mpwatch.RunResult[T]:
    """Run a function on the ranks of several nodes of a Dask cluster, and return the results of all ranks.

    Each node of the job is a Dask worker, and the ranks are child processes of this worker. If the Dask workers are on
    several hosts, each host has at most one node by default. If you pass `workers`, a host can have several nodes. The Dask
    workers must be able to import mpwatch and the modules of the function. The Dask workers must also be able to connect to
    the process that calls `run`. Dask sets OMP_NUM_THREADS to 1 in its workers, and the ranks inherit this value. To give
    the ranks another number of threads, set OMP_NUM_THREADS with the option `env`.

    Args:
        client: the client of the cluster, which must not be asynchronous.
        fn: see `mpwatch.run`.
        nprocs: number of ranks of each node, as for `mpwatch.run`.
        nodes: the number of nodes, or (min, max).
        workers: the addresses of the workers that may be nodes, on any host. None means all workers.
        resources: the resources that each node takes from its Dask worker, such as `{"GPU": 4}`. See "worker resources" in
            the documentation of Dask.
        address: the address of this process, to which the nodes connect. None means the address of the network interface
            that leads to the scheduler.
        options: other options of `mpwatch.cluster.run`. If `queue_timeout` is not set, the job waits without limit until the
            cluster has workers for min nodes.

    Raises: see `mpwatch.cluster.run`.
    """
    __tracebackhide__ = True
    _check_client(client)
    least, _ = cluster.check_nodes(nodes)
    engine = DaskEngine(client, least, workers=workers, resources=resources, address=address)
    return cluster.run(engine, fn, nprocs, nodes=nodes, find_address=_find_address, **options)


def _check_client(client: Client) -> None:
    if not isinstance(client, Client):
        raise TypeError(f"client must be a dask.distributed.Client, not {type(client).__name__}; a cluster has get_client()")
    if client.asynchronous:
        raise ValueError("the client is asynchronous, and run() waits for the job; call it with a Client of a thread")
    if client.status != "running":
        raise ValueError(f"the Dask client is not connected to a scheduler, it is {client.status}; make a new Client")


class DaskEngine:
    """Starts each node of a job as a task on a Dask worker that no other node uses.

    `workers` are the addresses of those that may be nodes; None: all, but one of each host if there are several hosts.
    `address` is that of this process; None: of the interface that leads to the scheduler.
    """

    def __init__(
        self,
        client: Client,
        least: int,
        *,
        workers: Collection[str] | None = None,
        resources: Mapping[str, float] | None = None,
        address: str | None = None,
    ) -> None:
        if isinstance(workers, str):
            raise TypeError(f"workers must be a collection of addresses, not a string; write [{workers!r}]")
        self._client = client
        self._loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop
        self._workers = None if workers is None else frozenset(workers)
        self._resources = dict(resources or {})
        self._least = least
        self._job = f"mpwatch-{secrets.token_hex(4)}"
        self._futures: dict[int, Future[cluster.NodeOutcome]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._used: dict[int, str] = {}  # the worker of each node that has one
        self._left: set[str] = set()  # workers that may still execute a task that was removed
        self._listed: list[str] = []
        self._listed_at = -POLL_SECONDS
        self._lock = asyncio.Lock()
        self._scheduler: str = client.scheduler.address
        self.address: str = address or get_ip(get_address_host(self._scheduler))

    def describe_wait(self) -> str:
        """Such as "the Dask cluster has a suitable worker for 1 of 2 nodes of the job"; empty if it waits for none, and
        after the first `start`. Raises LaunchError if the scheduler does not answer.
        """
        if self._futures:
            return ""
        try:
            count = len(self._ask(self._list_places, SYNC_SECONDS))
        except OSError as error:
            raise mpwatch.LaunchError(
                f"the Dask scheduler at {self._scheduler} does not say which workers it has: {error}."
                " Check that `client.nthreads()` answers, or make a new Client"
            ) from error
        if count >= self._least:
            return ""
        needs = f" with {self._resources}" if self._resources else ""
        return (
            f"the Dask cluster has a suitable worker for {count} of {self._least} nodes of the job: each node needs a worker"
            f" of its own{needs}, on a host of its own if there are several hosts. Start more workers, ask for fewer nodes,"
            " or list workers of any host in `workers`"
        )

    def start(self, call: Callable[[], cluster.NodeOutcome], number: int) -> "Future[cluster.NodeOutcome]":
        if self._client.status == "running":
            call_pickle = cloudpickle.dumps(call)
            self._futures[number] = asyncio.run_coroutine_threadsafe(self._execute(call_pickle, number), self._loop)
        else:
            self._futures[number] = Future()
            self._futures[number].set_exception(ConnectionError(f"the Dask client is {self._client.status}"))
        return self._futures[number]

    def cancel(self, number: int) -> None:
        """Remove the node's task. If the task is already running, it ends when the driver closes the node's connection."""
        self._futures[number].cancel()

    def close(self) -> None:
        """Remove all tasks, and wait until none runs. Errors are logged, as they would replace that of the job."""
        for future in self._futures.values():
            future.cancel()
        if not self._futures:
            return
        try:
            self._ask(self._wait_for_tasks, END_SECONDS + SYNC_SECONDS)
        except OSError as error:
            logger.warning("it is not known whether the Dask tasks of the job have ended: %s", error)

    # --- In the event loop of the client

    async def _execute(self, call: bytes, number: int) -> cluster.NodeOutcome:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            worker = await self._find_worker(number)
            return await self._execute_on(worker, call, f"{self._job}-{number}")
        except asyncio.CancelledError:
            self._left |= {self._used[number]} if number in self._used else set()
            raise
        finally:
            self._used.pop(number, None)
            self._listed_at = -POLL_SECONDS  # its worker may be gone
            self._tasks.discard(task)

    async def _find_worker(self, number: int) -> str:
        while True:
            workers = await self._list_workers()
            used = {self._find_place(worker, workers) for worker in self._used.values()}
            for worker in workers:
                if self._find_place(worker, workers) not in used:
                    self._used[number] = worker
                    return worker
            await asyncio.sleep(POLL_SECONDS)

    async def _execute_on(self, worker: str, call: bytes, key: str) -> cluster.NodeOutcome:
        scattered = await self._client.scatter(call, workers=[worker], hash=False)  # Dask warns of large values in a task
        dask_future = self._client.submit(
            _call,
            scattered,
            key=key,
            workers=[worker],
            allow_other_workers=False,
            resources=self._resources or None,
            pure=False,
            retries=0,  # mpwatch restarts the ranks, and the driver starts another node
        )
        result = asyncio.ensure_future(dask_future.result())
        try:
            while not (await asyncio.wait({result}, timeout=POLL_SECONDS))[0]:
                if worker not in await self._list_workers():
                    raise ConnectionError(f"the Dask worker {worker} is gone")
            if result.cancelled() or dask_future.cancelled():
                raise ConnectionError(f"the task {key} was cancelled, or the client has lost the scheduler")
            data, buffers = result.result()
            return cluster.NodeOutcome(data, [pickle.PickleBuffer(buffer) for buffer in buffers])
        finally:
            result.cancel()
            dask_future.release()
            scattered.release()

    async def _list_workers(self) -> list[str]:
        async with self._lock:
            if self._loop.time() - self._listed_at >= POLL_SECONDS / 2:
                workers = (await self._client.scheduler.identity())["workers"]
                self._listed = sorted(name for name, known in workers.items() if self._is_suitable(name, known["resources"]))
                self._listed_at = self._loop.time()
        return self._listed

    def _is_suitable(self, worker: str, resources: Mapping[str, float]) -> bool:
        has_resources = all(resources.get(name, 0) >= amount for name, amount in self._resources.items())
        return has_resources and (self._workers is None or worker in self._workers)

    def _find_place(self, worker: str, workers: Collection[str]) -> str:
        """Return the address at which there is at most one node: the host, or the worker, if the user has chosen workers or
        if all are on one host.
        """
        hosts = {get_address_host(other) for other in workers}
        return worker if self._workers is not None or len(hosts) == 1 else str(get_address_host(worker))

    async def _list_places(self) -> set[str]:
        workers = await self._list_workers()
        return {self._find_place(worker, workers) for worker in workers}

    async def _wait_for_tasks(self) -> None:
        """Wait until no task is left, in this process and in the workers."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._left and (workers := sorted(self._left & (await self._client.nthreads()).keys())):
            await self._client.run(_wait_until_ended, self._job, workers=workers, on_error="ignore")

    # --- In the driver's thread

    def _ask(self, question: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
        """Execute a coroutine in the event loop of the client. Raises OSError if the coroutine does not end in time."""
        if self._client.status != "running":
            raise ConnectionError(f"the Dask client is {self._client.status}")
        try:
            answer: T = self._client.sync(question, callback_timeout=seconds)
        except TimeoutError:
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        return answer


# --- In a Dask worker


def _call(call: bytes) -> tuple[bytes, list[bytearray]]:
    """Return the data of the NodeOutcome: bytes, since Dask chooses the pickle protocol."""
    outcome: cluster.NodeOutcome = pickle.loads(call)()
    return outcome.data, [bytearray(buffer) for buffer in outcome.buffers]


async def _wait_until_ended(job: str, dask_worker: Worker) -> None:
    """Wait for tasks that were removed while they ran: the worker forgets them when they have ended."""
    for _ in range(int(END_SECONDS / END_POLL_SECONDS)):
        if not any(str(key).startswith(job) for key in dask_worker.state.tasks):
            break
        await asyncio.sleep(END_POLL_SECONDS)


def _find_address() -> str:
    return str(get_address_host(get_worker().address))
