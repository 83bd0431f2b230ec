"""`run` submits a job with submitit, and waits for the values of all ranks."""

import socket
from collections.abc import Callable
from typing import Literal, TypeVar, Unpack

import submitit

import mpwatch
from mpwatch import cluster
from mpwatch.integrations.submitit.engine import SubmititEngine, find_kind
from mpwatch.integrations.submitit.preemption import was_preempted

T = TypeVar("T")


def run(
    executor: submitit.Executor,
    fn: Callable[..., T],
    nprocs: int | Literal["auto", "cpu", "gpu"],
    *,
    nodes: int | tuple[int, int],
    max_requeues: int = 3,
    address: str | None = None,
    **options: Unpack[cluster.JobOptions],
) -> mpwatch.RunResult[T]:
    """Run a function on the ranks of several nodes of a cluster, and return the results of all ranks.

    Set the parameters of the job in the executor, such as the time limit, the partition, and the CPUs and GPUs of each node.
    `run` sets the parameters `nodes` and `tasks_per_node` itself, in a copy of the executor. With a LocalExecutor, each node
    of the job is a process on this machine. When the job has ended, the log files of submitit stay in the executor's folder.

    Args:
        executor: an AutoExecutor, SlurmExecutor or LocalExecutor of submitit.
        fn: see `mpwatch.run`.
        nprocs: number of ranks of each node, as for `mpwatch.run`.
        nodes: the number of nodes, or the minimum and the maximum number. SLURM starts the minimum number together.
        max_requeues: how many times `run` submits the job again after SLURM has sent the signal of submitit. `fn` must
            continue from the data that it has saved. If SLURM sends the signal again after `max_requeues` new submissions,
            `stopped_at` of the result is the step at which the ranks have stopped.
        address: the address of this process, to which the nodes connect. None means the address of the machine's host name.
        options: other options of `mpwatch.cluster.run`. If `queue_timeout` is not set, the job waits without limit in
            SLURM's queue.

    Raises: see `mpwatch.cluster.run`.
    """
    __tracebackhide__ = True
    kind = find_kind(executor)
    least, _ = cluster.check_nodes(nodes)
    if max_requeues < 0:
        raise ValueError(f"max_requeues must be 0 or more, not {max_requeues!r}")
    while True:
        engine = SubmititEngine(executor, least, address=address or _find_own_address(kind))
        error: mpwatch.RunFailedError | None = None
        try:
            result = cluster.run(engine, fn, nprocs, nodes=nodes, **options)
        except mpwatch.RunFailedError as caught:
            result, error = caught.result, caught
        if max_requeues and was_preempted(result):
            max_requeues -= 1
        elif error is not None:
            raise error
        else:
            return result


def _find_own_address(kind: str) -> str:
    if kind == "local":
        return "127.0.0.1"
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # this sends nothing
        return str(probe.getsockname()[0])
