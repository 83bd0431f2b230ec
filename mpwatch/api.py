"""`run`, `submit` and `main` make a WorkerSpec from their options, and start the run that this WorkerSpec describes.

ARCHITECTURE.md shows the layers between `run` and the process of a rank.
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
from mpwatch.results.clean_text import clean_text
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.host_check import check_host
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

    Every rank is a child process of the calling process. When the first rank fails, mpwatch stops the other ranks. When
    `run` returns or raises an exception, every rank is dead and reaped, and no process is left in the Unix process group of
    any rank. If the main thread has called `run`, Ctrl-Z (SIGTSTP) suspends the calling process and the ranks until SIGCONT
    resumes them. The time for which Ctrl-Z suspends the ranks does not count towards `timeout` and the other time limits.

    Args:
        fn: any callable that can be pickled by cloudpickle: a function of a module, a script or a notebook cell, a lambda,
            closure, partial, bound method or callable object. The ranks do not import `__main__` again, so a script needs no
            `__main__` guard.
        nprocs: number of ranks. "gpu" means one rank for each GPU. "cpu" means one rank for each CPU that this process may
            use. "auto" means "gpu" if there is a GPU, and otherwise "cpu".
        args: positional arguments, the same for every rank, except those that are a `PerRank`. A rank learns its identity
            from `current_worker()`, from the environment (RANK, LOCAL_RANK, WORLD_SIZE, ...) or from torch.distributed.
        kwargs: keyword arguments.
        backend: backend of torch.distributed, such as "gloo" or "nccl". "auto" means nccl if there are GPUs, and otherwise
            gloo. Each rank makes the default process group before it calls fn, and destroys it after the call. None means
            that the ranks make no process group.
        env: extra environment variables for the ranks, or a function that returns them for a Worker.
        timeout: limit for the whole run in seconds, restarts included. None means no limit.
        heartbeat_timeout: the longest time in seconds without a call of `mpwatch.heartbeat()` or `mpwatch.report()`. The
            limit holds from the rank's first heartbeat or report on. A rank that exceeds this limit has failed
            (FailureKind.HANG). None means no limit.
        grace_period: seconds between SIGTERM and SIGKILL when a rank is stopped. A rank whose function has returned has the
            same time to exit.
        start_timeout: limit in seconds for the start of an interpreter. A rank that exceeds this limit has failed
            (FailureKind.START).
        max_restarts: how many times all ranks are restarted after a failure. It is a short form of
            RestartPolicy(max_restarts). None means 0, unless restart_policy sets another number.
        restart_policy: a RestartPolicy says after which failures, how often and with which delays ranks are restarted. The
            function must resume by itself, for example from a checkpoint. `current_worker().restart_count` counts the
            restarts.
        keep_going: True means that a rank that fails does not stop the other ranks. At the end RunFailedError says how many
            ranks failed, and `error.result` has the values of the other ranks. Use this option only for ranks that do not
            communicate. With `max_restarts`, only the failed rank is restarted. The option is a short form of
            RestartPolicy(scope="worker", keep_going=True).
        role: name of this kind of worker.
        logs: where stdout and stderr of the ranks go. See LogSpec. None means that they go to the caller's stdout and
            stderr. In a notebook, None means that the output is captured and shown in the calling cell.
        on_event: a function or several functions. `run` calls them in this thread with each `mpwatch.Event`. A function that
            raises an exception gets no more events. A KeyboardInterrupt from a function ends the run. While a function runs,
            signals are deferred, except a second Ctrl-C.
        progress: live view of the `report()` calls of the ranks. None shows the view in a terminal or a notebook, from the
            first report on. True shows the view from the start. Without a terminal or a notebook, the view then consists of
            lines on stderr. False never shows the view.
        rendezvous: how the nodes of a job on several machines find one another. See Rendezvous. Each node makes the same
            call, with the number of its own ranks as `nprocs`. None means that the run uses only this machine.
        capture_locals: True means that the frames of a rank's exception have the text of their local variables. Debuggers
            (`%debug`, `pdb.post_mortem`), pytest's `-l` and `traceback.TracebackException(capture_locals=True)` show them.
            The rank calls `repr` for the variables, for at most one second. A text has at most 2,000 characters, and a frame
            has at most 100 variables. False is the default because variables can contain secrets. The texts are not sent to
            other nodes.
        post_mortem: True means that a pdb prompt opens when a rank raises an exception, at the line that raised, and before
            any rank is stopped. Meanwhile the other ranks run or wait, and the command `rank N` shows the stack and the
            variables of rank N. When you leave the prompt (`q`), the run fails as without this option. Without a terminal or
            a notebook, mpwatch only logs a warning that no prompt can open.
        stall_after: seconds that ranks may wait in a collective of torch.distributed for a rank that has not joined the
            collective. After that mpwatch logs one warning that names the missing rank, and the run goes on. If the missing
            rank has already returned, the run ends. If ranks call different collectives with the same sequence number, the
            run ends within a few seconds (FailureKind.MISMATCH). None turns these checks off.
        backend_timeout: limit in seconds for each collective of the process group that `backend` makes. None means torch's
            default, which is 30 minutes for gloo and 10 minutes for nccl.
        stop_signals: signals to this process that ask all ranks to save and return, such as (signal.SIGUSR1,
            signal.SIGTERM). After such a signal, `mpwatch.should_stop(step)` becomes True on all ranks at the same step, and
            `result.stopped_at` is that step. The run succeeds, and the signal does nothing else in this process. If the same
            signal comes again, mpwatch stops the ranks as after SIGTERM (as after Ctrl-C if the signal is SIGINT). The
            signal then has its usual effect on this process. After the first signal, the other signals of this option have
            no effect. `run` must be called in the main thread, since Python runs signal handlers there. The ranks ignore
            these signals, except SIGTERM and SIGINT, because some schedulers send the signals to all processes. In a job of
            several nodes, a signal to one node requests a stop of the ranks of all nodes, if the nodes have already joined
            one another. `mpwatch.request_stop()` also requests a stop. Ranks that fail after the request are not restarted.
        stop_after: seconds from the start of the run until mpwatch requests such a stop. None means never.
        stop_timeout: seconds from the request to stop until all ranks must have returned. After that the ranks are stopped.
            If a signal requested the stop, the ranks are stopped as after a second signal. Otherwise the ranks are stopped
            as after `timeout`. None means no limit.
        bind: the CPUs on which each rank runs, from the start of its interpreter. "cores" splits the CPUs that this process
            may use evenly among the ranks of this machine, if possible as whole physical cores. "numa" gives a rank all
            allowed CPUs of the NUMA node of its GPU. Without a GPU, each rank gets its share of the NUMA nodes. A function
            gets a Worker, and returns the numbers of the CPUs for this rank. The option needs Linux. With this option,
            mpwatch sets OMP_NUM_THREADS to the number of cores of the rank, and TORCHINDUCTOR_COMPILE_THREADS to the number
            of its CPUs, at most 32. If you have set one of these variables, mpwatch does not change this variable. If ranks
            are bound to the same CPUs, the numbers are divided among these ranks. None means that ranks run on all CPUs that
            this process may use.
        visible_devices: "own" means that each rank sees only one GPU. The local rank is the number of this GPU among the
            GPUs that this process sees. In the rank this GPU is device 0, so call `torch.cuda.set_device(0)`. LOCAL_RANK
            stays the same. Code may fail if it copies directly from the GPU of another rank, or shares CUDA tensors with
            another rank. If `env` lists several devices, each rank sees one of these devices. If `env` lists one device,
            each rank sees that device. None means that each rank sees all GPUs.
        forward_signals: signals that are passed on to the ranks during the run, such as (signal.SIGUSR1,). A rank that runs
            fn gets such a signal if the rank has a handler for the signal. If the rank has no handler, a warning names the
            rank. If this program has a handler for the signal, that handler is called, too. Without a handler, the signal
            does not end this program during the run. With this option, `run` must be called in the main thread.
        check: False means that `run` returns the result of a failed run, and raises no RunFailedError.

    Returns:
        A RunResult with the return values by rank. `result[3]` is the value of rank 3, and iteration yields the values in
        the order of ranks. In a job of several nodes, each node gets the values of its own ranks, by global rank.

    Raises:
        RunFailedError: a rank failed. `__cause__` is the rank's own exception. A rank that exits without returning has
            failed, too.
        RunTimeoutError: `timeout` was exceeded. Or `stop_timeout` was exceeded after a request to stop that was not a
            signal.
        LaunchError: the ranks could not be started, and no rank is left. With `rendezvous`, this error also comes if the
            nodes have not met within `join_timeout` or `timeout`.
        TypeError, ValueError: an argument is not valid, or fn does not take these args and kwargs. No rank was started.
        RuntimeError: the call is made in a rank while the module of its function is imported. The new ranks would import
            this module, too.
        KeyboardInterrupt: the user pressed Ctrl-C. The ranks received SIGINT, too, and had grace_period seconds to exit. The
            note of the exception says where each rank was, and which step the rank had reported last.
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
    check_host()
    make_view = make_view or partial(select_view, spec.progress)
    if spec.rendezvous is None:
        return run_single_node(spec, make_view, **details)
    from mpwatch.multinode.run import run_multi_node  # imports torch

    return run_multi_node(spec, make_view, **details)


def submit(fn: Callable[..., T], nprocs: Nprocs = "auto", **options: Any) -> "RunHandle[T]":
    """Start a run in a new thread, and return at once, without waiting for the run.

    The arguments are pickled before `submit` returns. The thread of the run calls the functions that you pass as `on_event`,
    `retry_if` and `env`. mpwatch installs no signal handlers for a run that `submit` starts. A program that ends does not
    wait for submitted runs. At the end of the program, mpwatch sends SIGTERM to the ranks of submitted runs. A rank that has
    not exited after `grace_period` gets SIGKILL.

    Args:
        fn: see `run`.
        nprocs: see `run`.
        options: the other options of `run`.

    Returns:
        A RunHandle, which is a `concurrent.futures.Future` of the RunResult. It can also stop the run and look into the run.

    Raises:
        LaunchError: the function or its arguments cannot be pickled.
        TypeError, ValueError, RuntimeError: see `run`.
    """
    __tracebackhide__ = True
    check = options.pop("check", True)
    check_flag("check", check)
    return start_run(WorkerSpec(fn=fn, nprocs=nprocs, **options), check=check)


def start_run(spec: WorkerSpec[T], make_view: MakeView | None = None, *, check: bool) -> "RunHandle[T]":
    """Start a run as `submit` does, and show the run in the live view that `make_view` returns.

    If `make_view` is None, the option `progress` decides which live view is shown.
    """
    from mpwatch.run_handle import RunHandle  # imports concurrent.futures

    __tracebackhide__ = True
    refuse_signals(spec)
    check_host()
    check_not_importing()
    payload = pack_spec(spec)
    handle = RunHandle(lambda on_start: _run(spec, make_view, payload=payload, on_start=on_start), check=check)
    handle.start()
    return handle


def main(fn: Callable[..., T], nprocs: Nprocs = "auto", **options: Any) -> RunResult[T]:
    """Call `run`. If a rank fails, print the report on stderr, and end the program with that rank's exit status.

    Use `main` only in a program whose single task is the run, because `main` ends the program after a failure. The exit
    status comes from the rank that failed first. The exit status is 1 after an exception, 128 + n if signal n killed the
    rank, and 124 after a timeout. If the rank failed because it called `sys.exit(n)` or `os._exit(n)`, the exit status of
    the program is n. If the rank called `sys.exit(0)` or `os._exit(0)` before its function returned, the exit status of the
    program is 1.

    In a job of several nodes, `main` exits with the same status on every node, because some schedulers keep the status of
    only one node. If the program on a node receives a signal such as SIGTERM, the program dies of this signal.

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
            print(clean_text("".join(traceback.format_exception(cause))), end="", file=sys.stderr)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
