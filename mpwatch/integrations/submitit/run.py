"""`run` submits a job with submitit, and waits for the values of all ranks.

`SubmititEngine` starts nodes as jobs of submitit. `Task` is the function that each task of a submitit job runs.
"""

import copy
import os
import pickle
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Unpack

import cloudpickle
import submitit
from submitit.core.utils import JobPaths

import mpwatch
from mpwatch import cluster
from mpwatch.integrations.submitit.preemption import ignore_sigterm, preemption_signal, was_preempted
from mpwatch.os_support.clock import monotonic

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


class SubmititEngine:
    """Starts the minimum number of nodes as one job of submitit, and each further one as a job of its own."""

    def __init__(self, executor: submitit.Executor, least: int, *, address: str) -> None:
        self.address = address
        self.stop_signals = (preemption_signal(),)
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
        with ignore_sigterm():
            outcome = call()
        with suppress(FileNotFoundError):  # the driver is gone
            _write(f"{path}.outcome", pickle.dumps(outcome, protocol=5))
