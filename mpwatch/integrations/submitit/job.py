"""`Job` runs a function without a driver: the program that submits a `Job` can end while the job runs."""

import os
import secrets
import signal
import sys
import zlib
from collections.abc import Callable
from typing import Any, Literal, Unpack

import submitit
from submitit.helpers import DelayedSubmission

import mpwatch
from mpwatch.integrations.submitit.preemption import ignore_sigterm, preemption_signal, was_preempted


class Job:
    """A callable object that you pass to submitit's `executor.submit`.

    Configure the executor so that it starts one task on each node (`tasks_per_node=1`).

    Each task runs the ranks of its node with `mpwatch.run`, and returns the RunResult. `job.results()` of submitit returns a
    list with the RunResult of each task. Before the job loses its machines, SLURM sends the signal of submitit. After the
    signal of submitit, `mpwatch.should_stop` returns True in the ranks, so that the ranks can save and return. When the
    ranks have returned, submitit queues the job again, with the same arguments. Set the parameter `slurm_signal_delay_s` of
    the executor to the number of seconds that the ranks may need to save.

    Example:
        executor.update_parameters(nodes=4, tasks_per_node=1, timeout_min=60, slurm_signal_delay_s=120)
        job = executor.submit(Job(train, 8, args=(path,), backend="nccl"))

    Args:
        fn: see `mpwatch.run`.
        nprocs: number of ranks of each node.
        min_nodes: the job continues after the loss of nodes as long as this number of nodes remains. None means all nodes.
            If you set `min_nodes`, set these parameters of the executor, too, so that SLURM does not end the job when a node
            is lost: `slurm_additional_parameters={"no_kill": True}, slurm_srun_args=["--kill-on-bad-exit=0"]`.
        port: the port of the coordinator, on the first node. None means a port from 20000 to 29999, made from the id
            of the job.
        join_timeout: seconds that nodes wait for each other.
        node_timeout: seconds without a sign of life after which a node is lost.
        options: other options of `mpwatch.run`, except `rendezvous` and `stop`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        nprocs: int | Literal["auto", "cpu", "gpu"],
        *,
        min_nodes: int | None = None,
        port: int | None = None,
        join_timeout: float = 600.0,
        node_timeout: float = 15.0,
        **options: Unpack[mpwatch.RunOptions],
    ) -> None:
        for name in {"rendezvous", "stop"} & options.keys():
            raise TypeError(f"a Job has no option {name!r}: it follows from what submitit says in each task")
        self._fn = fn
        self._nprocs = nprocs
        self._min_nodes = min_nodes
        self._port = port
        self._options: dict[str, Any] = {"progress": False, **options}
        self._rendezvous: dict[str, Any] = {
            "join_timeout": join_timeout,
            "node_timeout": node_timeout,
            "secret": secrets.token_hex(16),
        }
        rendezvous = mpwatch.Rendezvous(f"node0:{port or 1}", run_id="job", nnodes=min_nodes or 1, **self._rendezvous)
        count = 1 if isinstance(nprocs, str) else nprocs  # the GPUs and CPUs of a node are counted there
        checked = {name: value for name, value in self._options.items() if name != "check"}
        mpwatch.WorkerSpec(fn=fn, nprocs=count, rendezvous=rendezvous, **checked)

    def __call__(self) -> mpwatch.RunResult[Any]:
        task = submitit.JobEnvironment()
        rendezvous = self._make_rendezvous(task)
        number = preemption_signal()
        error: mpwatch.RunFailedError | None = None
        with ignore_sigterm():
            try:
                result = mpwatch.run(self._fn, self._nprocs, rendezvous=rendezvous, stop=(number,), **self._options)
            except mpwatch.RunFailedError as caught:
                result, error = caught.result, caught
        if was_preempted(result):
            signal.raise_signal(number)  # now submitit acts on it: in task 0 this queues the job again, and exits
            if task.global_rank > 0:
                sys.exit()  # without a result, since there will be another one
        if error is not None:
            raise error
        return result

    def checkpoint(self) -> DelayedSubmission:
        """Return the object that submitit submits again after a preemption."""
        return DelayedSubmission(self)

    def _make_rendezvous(self, task: submitit.JobEnvironment) -> mpwatch.Rendezvous:
        nodes = task.num_tasks
        is_local = task.cluster == "local"
        if not is_local and task.num_nodes != nodes:
            raise ValueError(
                f"the number of tasks of the job is {nodes}, and the number of its nodes is {task.num_nodes}, but mpwatch "
                "needs one task a node, and starts the ranks there itself; call executor.update_parameters(tasks_per_node=1)"
            )
        host = "127.0.0.1" if is_local else task.hostnames[0]
        port = self._port or 20_000 + zlib.crc32(task.job_id.encode()) % 10_000
        count = os.environ.get("SLURM_RESTART_COUNT", "0")
        return mpwatch.Rendezvous(
            f"{host}:{port}",
            run_id=f"submitit-{task.job_id}-{count}",
            nnodes=(min(self._min_nodes or nodes, nodes), nodes),
            is_host=task.global_rank == 0,
            **self._rendezvous,
        )
