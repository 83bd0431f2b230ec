"""Run one job on several nodes of a SLURM cluster through submitit. There are two ways.

- `mpwatch.integrations.submitit.run(executor, train, 8, nodes=4)` waits for the values of all ranks.
  mpwatch/cluster/__init__.py describes how the driver and the nodes work together. This module starts the nodes.
- After `executor.submit(mpwatch.integrations.submitit.Job(train, 8))` the calling program may end. Each task calls the
  `Job`. The tasks meet in a store that the first task serves.

The least number of nodes is one SLURM job, with one task on each machine. So SLURM starts either all of these nodes or none.
With a job array, some nodes could hold their machines and wait for hours for the other nodes. Each further node, and each
node that replaces a lost node, is a SLURM job of its own. So these nodes come and go one by one.

    driver: SubmititEngine                  folder of the executor                task of SLURM
    ----------------------                  ----------------------                -------------
    start ---- 0.call, 1.call ------------> mpwatch-1234abcd/ ------------------> _Task: reads the call of its number
    submit ----------------- sbatch ------------------------------------------->  writes 0.begun, calls it,
    _poll <--- 0.outcome, 1.outcome ------- mpwatch-1234abcd/ <-----------------  writes 0.outcome

The calls contain the secret of the job, and a pickle can run any code. So only the user can read and write that folder.

Preemption: some time before SLURM takes the machines back, or before the time limit, it sends the signal of submitit
(SIGUSR2) to all processes of the job. `mpwatch.should_stop` then becomes True in all ranks at the same step, and the ranks
save and return. After that, submitit queues a `Job` again, and `run` itself submits its job again. If SLURM takes machines
back with SIGTERM alone, SIGTERM ends the ranks. To prevent this, set `PreemptParameters=send_user_signal`.
"""

import copy
import functools
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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle
import submitit
from submitit.core.utils import JobPaths
from submitit.helpers import DelayedSubmission

import mpwatch
from mpwatch import cluster

__all__ = ["Job", "run"]

T = TypeVar("T")
END_SECONDS = 5.0  # beyond the grace period, for a node to end when it has lost the driver
POLL_SECONDS = 0.5  # between two looks into the folder
CHECK_SECONDS = 30.0  # between two questions to SLURM
LOST_SECONDS = 5.0  # for the outcome of a job that has ended to be seen in a network file system
CANCEL_SECONDS = 10.0  # for a cancelled job to end
# For SLURM: a lost machine or a failed task does not end the job, and SLURM does not queue a job again that the driver
# has given up.
SLURM_PARAMETERS = {"no_kill": True, "no_requeue": True}
SRUN_ARGS = ["--kill-on-bad-exit=0"]


def run(
    executor: submitit.Executor,
    fn: Callable[..., T],
    nprocs: Any = "auto",
    *,
    nodes: int | tuple[int, int],
    max_requeues: int = 3,
    address: str | None = None,
    join_timeout: float = 600.0,
    **options: Any,
) -> mpwatch.RunResult[T]:
    """Run a function on the ranks of several nodes of a cluster, and return the results of all ranks.

    The executor has the parameters of the job: time, partition, CPUs and GPUs of a node and so on. This function sets
    `nodes` and `tasks_per_node` in a copy of the executor. With a LocalExecutor the nodes are processes of this machine. The
    logs of submitit stay in the executor's folder.

    Args:
        executor: an AutoExecutor, SlurmExecutor or LocalExecutor of submitit.
        fn: see `mpwatch.run`.
        nprocs: number of ranks of each node.
        nodes: the number of nodes, or the least and the greatest number. SLURM starts the least number together.
        max_requeues: how many times the job is submitted again after SLURM has sent its signal. The function must continue
            from what it has saved. After that, `stopped_at` of the result is the step at which the ranks have stopped.
        address: the address of this process, to which the nodes connect. If it is None, this is the address of the machine's
            host name.
        join_timeout: seconds that nodes wait for each other once SLURM has started the first one.
        options: other options of `mpwatch.cluster.run`.

    Raises: see `mpwatch.cluster.run`.
    """
    __tracebackhide__ = True
    kind = _find_kind(executor)
    least, _ = cluster.check_nodes(nodes)
    if max_requeues < 0:
        raise ValueError(f"max_requeues must be 0 or more, not {max_requeues!r}")
    grace_period = options.get("grace_period", 10.0)
    # the wrapper of fn takes any arguments
    mpwatch.WorkerSpec(
        fn=fn, nprocs=1, args=options.get("args", ()), kwargs=options.get("kwargs"), grace_period=grace_period
    )
    options |= {"nodes": nodes, "join_timeout": join_timeout}
    stop_seconds = grace_period + END_SECONDS
    while True:
        own_address = address or _find_own_address(kind)
        engine = SubmititEngine(executor, least, address=own_address, stop_seconds=stop_seconds)
        error: mpwatch.RunFailedError | None = None
        try:
            result = cluster.run(engine, _ignore_signal(fn), nprocs, **options)
        except mpwatch.RunFailedError as caught:
            result, error = caught.result, caught
            _remove_own_frame(caught.__cause__)
        was_cut_short = result.stopped_at is not None or result.state is not mpwatch.WorkerState.SUCCEEDED
        if engine.is_preempted and was_cut_short and max_requeues:
            max_requeues -= 1
        elif error is not None:
            raise error
        else:
            return result


class Job:
    """A function that you pass to `executor.submit`. The executor must start one task on each of its nodes.

    Each task runs the ranks of its node with `mpwatch.run`, and returns their RunResult. `job.results()` of submitit returns
    the list of all these results. When SLURM sends submitit's signal, `mpwatch.should_stop` returns True in the ranks, so
    that they save and return. submitit then queues the job again, with the same arguments. The parameter
    `slurm_signal_delay_s` of the executor must be long enough for saving.

    Example:
        executor.update_parameters(nodes=4, tasks_per_node=1, timeout_min=60, slurm_signal_delay_s=120)
        job = executor.submit(Job(train, 8, args=(path,), backend="nccl"))

    Args:
        fn: see `mpwatch.run`.
        nprocs: number of ranks of each node.
        min_nodes: the job continues without lost nodes as long as this number of nodes remains. None means all nodes. SLURM
            must also continue: `slurm_additional_parameters={"no_kill": True}, slurm_srun_args=["--kill-on-bad-exit=0"]`.
        port: the port of the store, on the first node. If it is None, the port follows from the number of the job.
        join_timeout: seconds that nodes wait for each other.
        node_timeout: seconds without a sign of life after which a node is lost.
        options: other options of `mpwatch.run`, except `rendezvous` and `stop_signals`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        nprocs: Any = "auto",
        *,
        min_nodes: int | None = None,
        port: int | None = None,
        join_timeout: float = 600.0,
        node_timeout: float = 15.0,
        **options: Any,
    ) -> None:
        for name in {"rendezvous", "stop_signals"} & options.keys():
            raise TypeError(f"a Job has no option {name!r}: it follows from what submitit says in each task")
        self._fn = fn
        self._nprocs = nprocs
        self._min_nodes = min_nodes
        self._port = port
        self._options = {"progress": False, **options}
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
        """Run the ranks of this node. submitit calls it in each task."""
        task = submitit.JobEnvironment()
        rendezvous = self._make_rendezvous(task)
        number = _preemption_signal()
        error: mpwatch.RunFailedError | None = None
        with _ignore_sigterm():
            try:
                result = mpwatch.run(self._fn, self._nprocs, rendezvous=rendezvous, stop_signals=(number,), **self._options)
            except mpwatch.RunFailedError as caught:
                result, error = caught.result, caught
        was_cut_short = result.stopped_at is not None or result.state is not mpwatch.WorkerState.SUCCEEDED
        if number.name in result.stop_cause and was_cut_short:
            signal.raise_signal(number)  # now submitit acts on it: in task 0 this queues the job again, and exits
            if task.global_rank > 0:
                sys.exit()  # without a result, since there will be another one
        if error is not None:
            raise error
        return result

    def checkpoint(self) -> DelayedSubmission:
        """Return what submitit queues again."""
        return DelayedSubmission(self)

    def _make_rendezvous(self, task: submitit.JobEnvironment) -> mpwatch.Rendezvous:
        nodes = task.num_tasks
        is_local = task.cluster == "local"
        if not is_local and task.num_nodes != nodes:
            raise ValueError(
                f"the job has {nodes} tasks on {task.num_nodes} nodes, but mpwatch needs one task a node, and starts the "
                "ranks there itself; call executor.update_parameters(tasks_per_node=1)"
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


class SubmititEngine:
    """Starts the least number of nodes as one job of submitit, and each other node as a job of its own.

    Args:
        executor: an executor of submitit. The engine uses a copy of it.
        least: the least number of nodes.
        address: the address of this process.
        stop_seconds: how long a node may need to end after it has lost the driver.

    Attributes:
        is_preempted: whether a node has received the signal of submitit.
    """

    def __init__(self, executor: submitit.Executor, least: int, *, address: str, stop_seconds: float = 15.0) -> None:
        self.address = address
        self.is_preempted = False
        self._kind = _find_kind(executor)
        self._executor = executor
        self._least = least
        self._stop_seconds = stop_seconds
        self._lock = threading.Lock()  # the two threads set the futures
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
        """Submit a node. The least number of nodes are submitted as one job, when the last of them is started."""
        _write(os.path.join(self._folder, f"{number}.call"), cloudpickle.dumps(call))
        self._futures[number] = Future()
        if number == self._least - 1:
            self._submit(range(self._least))
        elif number >= self._least:
            self._submit([number])
        return self._futures[number]

    def cancel(self, number: int) -> None:
        """Cancel the job of a node, if no other node of it runs. Otherwise the node ends when it has lost the driver."""
        with self._lock:
            self._futures[number].cancel()
        for job, numbers in self._jobs:
            if number in numbers and all(self._futures[other].done() for other in numbers) and not job.done():
                job.cancel(check=False)

    def close(self) -> None:
        """Wait for the jobs that have begun, cancel what is left, and remove the folder."""
        self._is_closed.set()
        with ExitStack() as stack:  # an impatient user may press Ctrl-C once more
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            stack.callback(self._cancel_jobs)
            if self._thread is not None:
                self._thread.join()
            with suppress(OSError):
                names = set(os.listdir(self._folder))
                begun = [job for job, numbers in self._jobs if any(f"{number}.begun" in names for number in numbers)]
                _wait_until_done(begun, self._stop_seconds)

    def _cancel_jobs(self) -> None:
        """Cancel all jobs that have not ended, and wait for that."""
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
        self._jobs.append((executor.submit(_Task(self._folder, numbers)), numbers))

    def _poll(self) -> None:
        """Set the futures of nodes that have ended, in a thread of its own."""
        checked_at = time.monotonic()
        while not self._is_closed.wait(POLL_SECONDS):
            is_check_due = time.monotonic() >= checked_at + CHECK_SECONDS
            checked_at = time.monotonic() if is_check_due else checked_at
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
                    is_preempted, outcome = pickle.load(stream)
                os.remove(path)
                self.is_preempted |= is_preempted
                self._set(number, outcome)
            elif has_ended:
                ended_at = self._ended_at.setdefault(number, time.monotonic())
                if time.monotonic() >= ended_at + LOST_SECONDS:
                    self._set(number, error=_explain_loss(job))

    def _set(self, number: int, outcome: cluster.NodeOutcome | None = None, error: Exception | None = None) -> None:
        future = self._futures[number]
        with self._lock:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            elif outcome is not None:
                future.set_result(outcome)


def _find_kind(executor: submitit.Executor) -> str:
    """Return the name of the cluster of an executor: "slurm", "local", or the name of a plugin."""
    if not isinstance(executor, submitit.Executor):
        raise TypeError(f"executor must be an executor of submitit, such as AutoExecutor, not {type(executor).__name__}")
    kind = executor.cluster if isinstance(executor, submitit.AutoExecutor) else executor.name()
    if kind == "debug":
        raise ValueError("a DebugExecutor runs jobs one after the other in this process; use AutoExecutor(cluster='local')")
    return str(kind)


def _make_parameters(executor: submitit.Executor, kind: str, tasks: int) -> dict[str, Any]:
    """Return the parameters of a job with this number of tasks, one on each node."""
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


def _find_own_address(kind: str) -> str:
    if kind == "local":
        return "127.0.0.1"
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # this sends nothing
        return str(probe.getsockname()[0])


def _remove_own_frame(error: BaseException | None) -> None:
    """Remove the frame of `_ignore_signal`, so that the traceback of a rank begins in its function."""
    trace = None if error is None else error.__traceback__
    if error is not None and trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = trace.tb_next


def _explain_loss(job: submitit.Job[Any]) -> Exception:
    task = job.task(0)
    lines = (task.stderr() or "").strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    where = f"see {task.paths.stderr}"
    return ChildProcessError(f"job {job.job_id} of submitit has ended without a result ({job.state}){last}; {where}")


def _wait_until_done(jobs: Sequence[submitit.Job[Any]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(job.done() for job in jobs) and time.monotonic() < deadline:
        time.sleep(0.1)


def _write(path: str, data: bytes) -> None:
    """Write a file in one step, so that no process reads half of it."""
    with open(f"{path}.new", "wb") as stream:
        stream.write(data)
    os.replace(f"{path}.new", path)


# --- In a task of submitit


@dataclass(frozen=True)
class _Task:
    """The function of a submitit job: it executes the call of its node."""

    folder: str
    numbers: tuple[int, ...]

    def __call__(self) -> None:
        path = os.path.join(self.folder, str(self.numbers[submitit.JobEnvironment().global_rank]))
        with open(f"{path}.call", "rb") as stream:
            call = pickle.load(stream)
        _write(f"{path}.begun", b"")
        with _stop_when_preempted() as is_preempted:
            outcome = call()
        with suppress(FileNotFoundError):  # the driver is gone
            _write(f"{path}.outcome", pickle.dumps((is_preempted.is_set(), outcome), protocol=5))


@contextmanager
def _stop_when_preempted() -> Iterator[threading.Event]:
    """Ask all ranks to stop when this process gets the signal of submitit. Yield an event that is set then.

    Any thread may get a signal, and the main thread waits for a lock. So another thread reads Python's wake-up descriptor.
    Threads that start within the block, and the guardian process, block the signal.
    """
    number = _preemption_signal()
    is_preempted, is_over = threading.Event(), threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def follow() -> None:
        while data := reader.recv(64):
            if number in data:
                is_preempted.set()
                while not mpwatch.request_stop() and not is_over.wait(POLL_SECONDS):
                    pass  # the ranks have not been started yet

    thread = threading.Thread(target=follow, name="mpwatch preemption")
    thread.start()  # with the signal not blocked
    signal.signal(number, lambda *_: None)  # for good, since submitit would queue a job again that the driver has given up
    wakeup_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield is_preempted
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(wakeup_fd)
        is_over.set()
        writer.close()
        thread.join()
        reader.close()


@contextmanager
def _ignore_sigterm() -> Iterator[None]:
    """Ignore SIGTERM in this process, as submitit does: SLURM sends it together with the signal of submitit."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _preemption_signal() -> signal.Signals:
    return signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]


# --- In a rank


def _ignore_signal(fn: Callable[..., T]) -> Callable[..., T]:
    """Return a function that ignores the signal of submitit and then calls `fn`. SLURM sends the signal to all processes."""
    number = int(_preemption_signal())

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> T:
        signal.signal(number, signal.SIG_IGN)
        return fn(*args, **kwargs)

    return call
