"""`run`, `submit` and `main`: make a WorkerSpec of the options, run it, and raise an error if a rank failed.

The layers from here to the process of a rank: `run_single_node` (watcher/run.py), `BlockingCall`, `WatcherThread`,
`EventLoop`, `ProcessPool`, and the process. ARCHITECTURE.md shows them.
"""

import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mpwatch.errors import RunFailedError, raise_if_failed
from mpwatch.live_view.select import select_view
from mpwatch.options.log_spec import LogSpec
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.options.spec import Bind, Nprocs, Observers, VisibleDevices, WorkerSpec
from mpwatch.options.validation import check_flag
from mpwatch.options.worker_info import Worker
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.import_check import check_not_importing
from mpwatch.watcher.observers.view_driver import MakeView
from mpwatch.watcher.run import pack_spec, run_single_node
from mpwatch.watcher.signal_options import refuse_signals

if TYPE_CHECKING:
    from mpwatch.run_handle import RunHandle

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    nprocs: Nprocs = "auto",
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    env: Mapping[str, str] | Callable[[Worker], Mapping[str, str]] | None = None,
    timeout: float | None = None,
    heartbeat_timeout: float | None = None,
    grace_period: float = 10.0,
    start_timeout: float = 300.0,
    max_restarts: int | None = None,
    restart_policy: RestartPolicy | None = None,
    keep_going: bool = False,
    role: str = "default",
    logs: LogSpec | None = None,
    on_event: Observers | None = None,
    progress: bool | None = None,
    rendezvous: Rendezvous | None = None,
    capture_locals: bool = False,
    post_mortem: bool = False,
    stall_after: float | None = 60.0,
    backend_timeout: float | None = None,
    stop_signals: Collection[int] = (),
    stop_after: float | None = None,
    stop_timeout: float | None = None,
    bind: Bind | None = None,
    visible_devices: VisibleDevices | None = None,
    forward_signals: Collection[int] = (),
    check: bool = True,
) -> RunResult[T]:
    """Call `fn(*args, **kwargs)` in `nprocs` processes, watch them until they exit, and return their results.

    Every rank is a child of this process. At the first failure the other ranks are stopped. When `run` returns or raises,
    every rank, and every process that a rank started in its process group, is dead and reaped. Ctrl-Z (SIGTSTP) suspends all
    of them together with this process until SIGCONT, if `run` was called in the main thread. No limit counts that time.

    Args:
        fn: any callable that can be pickled by cloudpickle: a function of a module, a script or a notebook cell, a lambda,
            closure, partial, bound method or callable object. `__main__` is not imported again, and needs no guard.
        nprocs: number of ranks. "gpu": one for each GPU. "cpu": one for each CPU that this process may use. "auto": "gpu" if
            there is a GPU, else "cpu".
        args: positional arguments, the same for every rank, except those that are a `PerRank`. A rank learns its identity
            from `current_worker()`, from the environment (RANK, LOCAL_RANK, WORLD_SIZE, ...) or from torch.distributed.
        kwargs: keyword arguments.
        backend: backend of torch.distributed: "gloo", "nccl", ...; "auto" is nccl with GPUs, else gloo. The default process
            group is made before fn is called and destroyed after it. None: no process group is made.
        env: extra environment variables for the ranks, or a function that returns them for a Worker.
        timeout: limit for the whole run in seconds, restarts included. None: no limit.
        heartbeat_timeout: seconds without `mpwatch.heartbeat()` or `mpwatch.report()`, counted from the rank's first one. A
            rank that exceeds this limit has failed (FailureKind.HANG). None: no limit.
        grace_period: seconds between SIGTERM and SIGKILL when a rank is stopped. A rank that has returned has the same time
            to exit.
        start_timeout: limit in seconds for the start of an interpreter. A rank that exceeds it has failed
            (FailureKind.START).
        max_restarts: how many times all ranks are restarted after a failure. It is short for RestartPolicy(max_restarts).
            None: 0, unless restart_policy sets another number.
        restart_policy: after which failures, how often and with which delays ranks are restarted. See RestartPolicy. The
            function must resume by itself, for example from a checkpoint; `current_worker().restart_count` counts restarts.
        keep_going: True: a rank that fails does not stop the others. At the end RunFailedError says how many ranks failed.
            `error.result` has the values of those that returned. This is for ranks that do not communicate. With
            `max_restarts` a failed rank is restarted alone. It is short for RestartPolicy(scope="worker", keep_going=True).
        role: name of this kind of worker.
        logs: where stdout and stderr of the ranks go. See LogSpec. None: to the caller's stdout and stderr. In a notebook
            None means that the output is captured and shown in the calling cell.
        on_event: a function or several functions, called in this thread with each `mpwatch.Event`. A function that raises
            is dropped, whatever it raises, except KeyboardInterrupt, which ends the run. While the function runs, signals
            are deferred, except a second Ctrl-C.
        progress: live view of the `report()` calls of the ranks. None: shown in a terminal or a notebook, from the first
            report. True: shown from the start; without terminal and notebook as lines on stderr. False: never shown.
        rendezvous: for ranks on several machines: how the nodes find one another. See Rendezvous. Each node makes the same
            call, and `nprocs` is its own number of ranks. None: this machine alone.
        capture_locals: True: the frames of a rank's exception have the text of their local variables. Debuggers (`%debug`,
            `pdb.post_mortem`), pytest's `-l` and `traceback.TracebackException(capture_locals=True)` show them. The rank
            makes the texts with `repr`, and waits one second for them. A text has 2,000 characters at most, and a frame
            100 variables. False is the default because variables can hold secrets. They are not sent to other nodes.
        post_mortem: True: if a rank raises an exception, a prompt of pdb opens where it was raised, before any rank is
            stopped. The other ranks run or wait meanwhile, and `rank N` shows the stack and the variables of another
            rank. When the prompt is left (`q`), the run fails as without it. It needs a terminal or a notebook. Elsewhere it
            has no effect.
        stall_after: seconds. If ranks have waited so long in a collective of torch.distributed for a rank that has not
            joined it, mpwatch logs one warning that names that rank, and goes on; if that rank has returned, the run
            ends. If ranks call different collectives with the same number, the run ends within a few seconds
            (FailureKind.MISMATCH). None: none of this.
        backend_timeout: limit in seconds for each collective of the process group that `backend` makes. None: torch's
            default, which is 30 minutes for gloo and 10 for nccl.
        stop_signals: signals to this process that ask all ranks to save and return, such as (signal.SIGUSR1,
            signal.SIGTERM). `mpwatch.should_stop(step)` then becomes True on all ranks at the same step, and
            `result.stopped_at` is that step. The run succeeds, and this process does not get the signal. If the same signal
            comes again, the ranks are stopped as by SIGTERM (with SIGINT as by Ctrl-C), and this process gets the signal
            then. Other signals of this option change nothing after the first one. The option needs the main thread, since
            signal handlers run there. The ranks ignore these signals, except SIGTERM and SIGINT: some schedulers send them
            to all processes. On several nodes a signal to one node counts for all, once they have met. A stop can also be
            requested by `mpwatch.request_stop()`. Ranks that fail after that are not restarted.
        stop_after: seconds from the start of the run to such a request. None: never.
        stop_timeout: seconds from such a request until all ranks must have returned. After that the ranks are stopped: as by
            the second signal, if a signal has requested it, or else as by `timeout`. None: no limit.
        bind: the CPUs on which each rank runs, from the start of its interpreter. "cores": the CPUs that this process may
            use are split evenly among the ranks of this machine, whole physical cores first. "numa": all allowed CPUs of the
            NUMA node of the rank's GPU. Without a GPU, the NUMA nodes are dealt out to the ranks. A function: it returns the
            numbers of the CPUs for a Worker. It needs Linux. Unless you set them, OMP_NUM_THREADS is then the number of
            cores of the rank, and TORCHINDUCTOR_COMPILE_THREADS the number of its CPUs, at most 32. Ranks that are bound to
            the same CPUs divide these numbers. None: ranks run on all CPUs that this process may use.
        visible_devices: "own": each rank sees one GPU only: of those that this process sees, the one whose number is the
            local rank. In the rank it is device 0: `torch.cuda.set_device(0)`, not LOCAL_RANK, which stays the same.
            Code that copies directly from the GPU of another rank, or shares CUDA tensors with another rank, may
            fail. If `env` lists several devices, each rank sees one of these; if it lists one device, each rank sees that
            one. None: each rank sees all GPUs.
        forward_signals: signals that are passed on to the ranks during the run, such as (signal.SIGUSR1,). A rank that runs
            fn gets such a signal if it has a handler for it. If it has none, a warning names the rank. A handler that this
            program has for the signal is called, too. Without one, the signal does not end this program meanwhile. `run`
            must be called in the main thread then.
        check: False: return the result of a failed run instead of raising.

    Returns:
        The return values by rank: `result[3]` is that of rank 3, and iteration yields them in the order of ranks. In a job
        of several nodes each node gets the values of its own ranks, by global rank.

    Raises:
        RunFailedError: a rank failed. `__cause__` is the rank's own exception. A rank that exits without returning failed.
        RunTimeoutError: `timeout` was exceeded, or `stop_timeout` after a request that was not a signal.
        LaunchError: the ranks could not be started; none is left. With `rendezvous`: the nodes have not met within
            `join_timeout` or `timeout`.
        TypeError, ValueError: an argument is not valid, or fn does not take these args and kwargs. No rank was started.
        RuntimeError: the call is made in a rank at the import of the module of its function. Its ranks would import it, too.
        KeyboardInterrupt: Ctrl-C. The ranks received SIGINT, too, and had grace_period seconds to exit. Its note says where
            each rank was, and which step it had reported last.
    """
    __tracebackhide__ = True  # IPython and pytest then show the user's frames only
    check_flag("check", check)
    spec = WorkerSpec(
        fn=fn,
        nprocs=nprocs,
        args=args,
        kwargs=kwargs,
        backend=backend,
        env=env,
        timeout=timeout,
        heartbeat_timeout=heartbeat_timeout,
        grace_period=grace_period,
        start_timeout=start_timeout,
        max_restarts=max_restarts,
        restart_policy=restart_policy,
        keep_going=keep_going,
        role=role,
        logs=logs,
        on_event=on_event,
        progress=progress,
        rendezvous=rendezvous,
        capture_locals=capture_locals,
        post_mortem=post_mortem,
        stall_after=stall_after,
        backend_timeout=backend_timeout,
        stop_signals=stop_signals,
        stop_after=stop_after,
        stop_timeout=stop_timeout,
        bind=bind,
        visible_devices=visible_devices,
        forward_signals=forward_signals,
    )
    result = _run(spec)
    if check:
        raise_if_failed(result)
    return result


def _run(spec: WorkerSpec[T], make_view: MakeView | None = None, **details: Any) -> RunResult[T]:
    __tracebackhide__ = True
    make_view = make_view or partial(select_view, spec.progress)
    if spec.rendezvous is None:
        return run_single_node(spec, make_view, **details)
    from mpwatch.multinode.run import run_multi_node  # imports torch

    return run_multi_node(spec, make_view, **details)


def submit(fn: Callable[..., T], nprocs: Nprocs = "auto", **options: Any) -> "RunHandle[T]":
    """Start a run in a thread of its own, and return at once.

    The arguments are pickled before `submit` returns. Observers, `retry_if` and `env` are called in the thread of the run.
    Signals to the program are left to the program. A program that ends stops its ranks, and does not wait for the run:
    the ranks get SIGTERM, and SIGKILL after `grace_period`.

    Args:
        fn: see `run`.
        nprocs: see `run`.
        options: the other options of `run`.

    Returns:
        A `concurrent.futures.Future` of the RunResult, which can also stop the run and look into it: see RunHandle.

    Raises:
        LaunchError: the function or its arguments cannot be pickled.
        TypeError, ValueError, RuntimeError: see `run`.
    """
    __tracebackhide__ = True
    check = options.pop("check", True)
    check_flag("check", check)
    return start_run(WorkerSpec(fn=fn, nprocs=nprocs, **options), check=check)


def start_run(spec: WorkerSpec[T], make_view: MakeView | None = None, *, check: bool) -> "RunHandle[T]":
    """Start a run as `submit` does, with a live view of the caller's own. None: the view that the options choose."""
    from mpwatch.run_handle import RunHandle  # imports concurrent.futures

    __tracebackhide__ = True
    refuse_signals(spec)
    check_not_importing()
    payload = pack_spec(spec)
    handle = RunHandle(lambda on_start: _run(spec, make_view, payload=payload, on_start=on_start), check=check)
    handle.start()
    return handle


def main(fn: Callable[..., T], nprocs: Nprocs = "auto", **options: Any) -> RunResult[T]:
    """Call `run`; if a rank fails, print the report on stderr and exit with the status of that rank.

    This is for a program that consists of the run only. The exit status is that of the rank which failed first: the status
    of sys.exit or os._exit, 128 + n for signal n, 1 for an exception, 124 for a timeout. In a job of several nodes every
    node exits with this status, on whichever node that rank was, since schedulers keep the status of one node only. (Under
    torchrun it is 1.) A node that receives a terminating signal dies of this signal.

    Args:
        fn: see `run`.
        nprocs: see `run`.
        options: the other options of `run`, except `check`.

    Returns:
        The result of `run`.

    Raises:
        SystemExit: a rank failed.
        LaunchError, TypeError, ValueError, KeyboardInterrupt: see `run`.
    """
    if "check" in options:
        raise TypeError("main() has no option 'check': a failure always ends the program; use run()")
    try:
        return run(fn, nprocs, **options)
    except RunFailedError as error:
        cause = error.__cause__
        if cause is not None:
            traceback.print_exception(cause)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
