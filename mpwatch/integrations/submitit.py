"""Run one job on several nodes of a SLURM cluster through submitit. There are two ways.

- `mpwatch.integrations.submitit.run(executor, train, 8, nodes=4)` waits for the values of all ranks.
  mpwatch/cluster/__init__.py describes how the driver and the nodes work together.
- A program that calls `executor.submit(mpwatch.integrations.submitit.Job(train, 8))` can end while the job runs. Each SLURM
  task calls the `Job` object. The first task runs the coordinator of the job.

`run` submits the minimum number of nodes as one SLURM job, one task on each machine, since SLURM starts the tasks of one
job at the same time. Each further node, and each that replaces a lost one, is a SLURM job of its own.

    driver: SubmititEngine                  folder of the executor                task of SLURM
    ----------------------                  ----------------------                -------------
    start ---- 0.call, 1.call ------------> mpwatch-1234abcd/ ------------------> Task: reads the call of its number
    submit ----------------- sbatch ------------------------------------------->  writes 0.begun, calls it,
    _poll <--- 0.outcome, 1.outcome ------- mpwatch-1234abcd/ <-----------------  writes 0.outcome

The folder, such as mpwatch-1234abcd, contains pickles with the secret of the job, so only this user can read and write it.

Preemption: before SLURM takes the machines back, or at the time limit, it sends the signal of submitit (SIGUSR2) to all
processes of the job. Then `mpwatch.should_stop` is True in all ranks at the same step, and when they have returned, the job
is submitted again: a `Job` by submitit, another one by `run`. If SLURM sends only SIGTERM, the ranks end before they can
save, unless slurm.conf has `PreemptParameters=send_user_signal`.
"""

import copy
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Unpack

import cloudpickle
import submitit
from submitit.core.utils import JobPaths
from submitit.helpers import DelayedSubmission

import mpwatch
from mpwatch import cluster
from mpwatch.os_support.clock import monotonic

__all__ = ["Job", "run"]

T = TypeVar("T")
POLL_SECONDS = 0.5  # between two looks into the folder
CHECK_SECONDS = 30.0  # between two questions to SLURM
LOST_SECONDS = 5.0  # for the outcome of a job that has ended to be seen in a network file system
CANCEL_SECONDS = 10.0  # for a cancelled job to end
END_SECONDS = 15.0  # for a node to end when it has lost the driver
# For SLURM: a lost machine or a failed task does not end the job, and SLURM does not queue a job again that the driver
# has given up.
SLURM_PARAMETERS = {"no_kill": True, "no_requeue": True}
SRUN_ARGS = ["--kill-on-bad-exit=0"]


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
    kind = _find_kind(executor)
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
        if max_requeues and _was_preempted(result):
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


class SubmititEngine:
    """Starts the minimum number of nodes as one job of submitit, and each further one as a job of its own."""

    def __init__(self, executor: submitit.Executor, least: int, *, address: str) -> None:
        self.address = address
        self.stop_signals = (_preemption_signal(),)
        self._kind = _find_kind(executor)
        self._executor = executor
        self._least = least
        self._futures: dict[int, Future[cluster.NodeOutcome]] = {}
        self._jobs: list[tuple[submitit.Job[Any], tuple[int, ...]]] = []  # each with the numbers of its nodes
        self._ended_at: dict[int, float] = {}  # when a node without outcome was first seen to have ended
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        base = JobPaths.get_first_id_independent_folder(executor.folder)
        base.mkdir(parents=True, exist_ok=True)
        self._folder = os.path.join(base, f"mpwatch-{secrets.token_hex(4)}")
        os.mkdir(self._folder, 0o700)

    def start(self, call: Callable[[], cluster.NodeOutcome], number: int) -> "Future[cluster.NodeOutcome]":
        _write(os.path.join(self._folder, f"{number}.call"), cloudpickle.dumps(call))
        self._futures[number] = Future()
        if number == self._least - 1:
            self._submit(range(self._least))
        elif number >= self._least:
            self._submit([number])
        return self._futures[number]

    def describe_wait(self) -> str:
        waiting = [job.job_id for job, numbers in self._jobs if not all(self._futures[number].done() for number in numbers)]
        return f"no node of these jobs of submitit has connected to this program: {', '.join(waiting)}" if waiting else ""

    def cancel(self, number: int) -> None:
        """Cancel the submitit job, too, if no other node of it runs. The node ends in any case, since its connection is
        closed.
        """
        self._futures[number].cancel()
        for job, numbers in self._jobs:
            if number in numbers and all(self._futures[other].done() for other in numbers) and not job.done():
                job.cancel(check=False)

    def close(self) -> None:
        self._is_closed.set()
        with ExitStack() as stack:  # an impatient user may press Ctrl-C once more
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            stack.callback(self._cancel_jobs)
            if self._thread is not None:
                self._thread.join()
            with suppress(OSError):
                names = set(os.listdir(self._folder))
                begun = [job for job, numbers in self._jobs if any(f"{number}.begun" in names for number in numbers)]
                _wait_until_done(begun, END_SECONDS)

    def _cancel_jobs(self) -> None:
        left = [job for job, _ in self._jobs if not job.done()]
        for job in left:
            job.cancel(check=False)
        _wait_until_done(left, CANCEL_SECONDS)
        for future in self._futures.values():
            future.cancel()

    def _submit(self, numbers: Sequence[int]) -> None:
        with ThreadPoolExecutor(1) as submitter:  # Ctrl-C must not come between sbatch and the entry in the list
            submitter.submit(self._submit_job, tuple(numbers)).result()
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="mpwatch submitit", daemon=True)
            self._thread.start()

    def _submit_job(self, numbers: tuple[int, ...]) -> None:
        executor = copy.deepcopy(self._executor)
        executor.update_parameters(**_make_parameters(executor, self._kind, len(numbers)))
        self._jobs.append((executor.submit(Task(self._folder, numbers)), numbers))

    def _poll(self) -> None:
        checked_at = monotonic()
        while not self._is_closed.wait(POLL_SECONDS):
            is_check_due = monotonic() >= checked_at + CHECK_SECONDS
            checked_at = monotonic() if is_check_due else checked_at
            for job, numbers in list(self._jobs):
                running = [number for number in numbers if not self._futures[number].done()]
                try:
                    if running:
                        self._look_at(job, running, is_check_due=is_check_due)
                except Exception as error:  # noqa: BLE001  the driver raises it
                    for number in running:
                        self._set(number, error=error)

    def _look_at(self, job: submitit.Job[Any], running: Sequence[int], *, is_check_due: bool) -> None:
        if is_check_due:
            job.task(0).done(force_check=True)  # submitit itself asks SLURM every ten minutes at last
        has_ended = job.done()
        with suppress(OSError):
            os.utime(self._folder)  # a network file system then looks at the folder again
        for number in running:
            path = os.path.join(self._folder, f"{number}.outcome")
            if os.path.exists(path):
                with open(path, "rb") as stream:
                    outcome = pickle.load(stream)
                os.remove(path)
                self._set(number, outcome)
            elif has_ended:
                ended_at = self._ended_at.setdefault(number, monotonic())
                if monotonic() >= ended_at + LOST_SECONDS:
                    self._set(number, error=_explain_loss(job))

    def _set(self, number: int, outcome: cluster.NodeOutcome | None = None, error: Exception | None = None) -> None:
        with suppress(InvalidStateError):  # it was cancelled
            if error is not None:
                self._futures[number].set_exception(error)
            elif outcome is not None:
                self._futures[number].set_result(outcome)


def _find_kind(executor: submitit.Executor) -> str:
    """Return the kind of cluster that an executor uses: "slurm", "local", or the name of a plugin."""
    if not isinstance(executor, submitit.Executor):
        raise TypeError(f"executor must be an executor of submitit, such as AutoExecutor, not {type(executor).__name__}")
    kind = executor.cluster if isinstance(executor, submitit.AutoExecutor) else executor.name()
    if kind == "debug":
        raise ValueError("a DebugExecutor runs jobs one after the other in this process; use AutoExecutor(cluster='local')")
    return str(kind)


def _make_parameters(executor: submitit.Executor, kind: str, tasks: int) -> dict[str, Any]:
    if kind == "local":
        return {"tasks_per_node": tasks}
    is_auto = isinstance(executor, submitit.AutoExecutor)
    parameters: dict[str, Any] = {"nodes": tasks, "tasks_per_node" if is_auto else "ntasks_per_node": 1}
    if kind == "slurm":
        prefix = "slurm_" if is_auto else ""
        given = executor.parameters
        parameters[f"{prefix}additional_parameters"] = {**SLURM_PARAMETERS, **(given.get("additional_parameters") or {})}
        parameters[f"{prefix}srun_args"] = [*SRUN_ARGS, *(given.get("srun_args") or ())]
    return parameters


def _explain_loss(job: submitit.Job[Any]) -> Exception:
    task = job.task(0)
    lines = (task.stderr() or "").strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    where = f"see {task.paths.stderr}"
    return ChildProcessError(f"job {job.job_id} of submitit has ended without a result ({job.state}){last}; {where}")


def _wait_until_done(jobs: Sequence[submitit.Job[Any]], seconds: float) -> None:
    deadline = monotonic() + seconds
    while not all(job.done() for job in jobs) and monotonic() < deadline:
        time.sleep(0.1)


def _write(path: str, data: bytes) -> None:
    """Write a file in one step, so that no process can read a file that is only half written."""
    with open(f"{path}.new", "wb") as stream:
        stream.write(data)
    os.replace(f"{path}.new", path)


@dataclass(frozen=True)
class Task:
    """The function that each task of a submitit job runs, as one node."""

    folder: str
    numbers: tuple[int, ...]

    def __call__(self) -> None:
        path = os.path.join(self.folder, str(self.numbers[submitit.JobEnvironment().global_rank]))
        with open(f"{path}.call", "rb") as stream:
            call = pickle.load(stream)
        _write(f"{path}.begun", b"")
        with _ignore_sigterm():
            outcome = call()
        with suppress(FileNotFoundError):  # the driver is gone
            _write(f"{path}.outcome", pickle.dumps(outcome, protocol=5))


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
        number = _preemption_signal()
        error: mpwatch.RunFailedError | None = None
        with _ignore_sigterm():
            try:
                result = mpwatch.run(self._fn, self._nprocs, rendezvous=rendezvous, stop=(number,), **self._options)
            except mpwatch.RunFailedError as caught:
                result, error = caught.result, caught
        if _was_preempted(result):
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


def _preemption_signal() -> signal.Signals:
    return signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]


def _was_preempted(result: mpwatch.RunResult[Any]) -> bool:
    """Return whether the signal has ended the function before it was ready."""
    was_cut_short = result.stopped_at is not None or result.state is not mpwatch.WorkerState.SUCCEEDED
    return was_cut_short and _preemption_signal().name in result.stop_cause


@contextmanager
def _ignore_sigterm() -> Iterator[None]:
    """Ignore SIGTERM in this process, because SLURM sends SIGTERM together with the signal of submitit."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
