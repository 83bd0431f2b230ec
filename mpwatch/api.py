"""`run`, `submit` and `main` make a WorkerSpec from their options, and start the run that this WorkerSpec describes.

ARCHITECTURE.md shows the layers between `run` and the process of a rank.
"""

import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from mpwatch.errors import RunFailedError, raise_if_failed
from mpwatch.live_view.select import select_view
from mpwatch.options.backend import Backend
from mpwatch.options.log_spec import LogSpec
from mpwatch.options.placement import Cpus, Placement
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.options.spec import CallOptions, Debug, Env, Nprocs, Observers, ProgressObservers, RunOptions, WorkerSpec
from mpwatch.options.stop_policy import StopPolicy
from mpwatch.options.validation import check_flag, refuse_unknown
from mpwatch.results.clean_text import clean_text
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.host_check import check_host, warn_of_memory
from mpwatch.watcher.import_check import check_not_importing
from mpwatch.watcher.observers.view_driver import MakeView
from mpwatch.watcher.run import pack_spec, run_single_node
from mpwatch.watcher.running_calls import add_call
from mpwatch.watcher.signal_options import refuse_signals

if TYPE_CHECKING:
    from mpwatch.run_handle import RunHandle

T = TypeVar("T")


@overload
def run(fn: WorkerSpec[T], *, check: bool = ...) -> RunResult[T]: ...
@overload
def run(fn: Callable[..., T], nprocs: Nprocs, **options: Unpack[RunOptions]) -> RunResult[T]: ...


def run(
    fn: Callable[..., T] | WorkerSpec[T],
    nprocs: Nprocs | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    backend: str | Backend | None = None,
    env: Env | None = None,
    timeout: float | None = None,
    heartbeat_timeout: float | None = None,
    grace_period: float = 10.0,
    max_restarts: int | RestartPolicy = 0,
    keep_going: bool = False,
    stop: StopPolicy | Collection[int] | None = None,
    placement: Placement | Cpus | None = None,
    logs: LogSpec | None = None,
    progress: bool | None = None,
    on_event: Observers | None = None,
    on_progress: ProgressObservers | None = None,
    rendezvous: Rendezvous | None = None,
    debug: Debug | None = None,
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
            `__main__` guard. Or a WorkerSpec, which has all other options except `check`.
        nprocs: number of ranks. "gpu" means one rank for each GPU. "cpu" means one rank for each CPU that this process may
            use. "auto" means "gpu" if there is a GPU, and otherwise "cpu".
        args: positional arguments, the same for every rank, except those that are a `PerRank`. A rank learns its identity
            from `current_worker()`, from the environment (RANK, LOCAL_RANK, WORLD_SIZE, ...) or from torch.distributed.
        kwargs: keyword arguments.
        backend: the process group of torch.distributed that each rank makes before it calls fn, and destroys after the call,
            such as "gloo" or "nccl". "auto" means nccl if there are GPUs, and otherwise gloo. A Backend also sets limits for
            collectives. None means that mpwatch makes no process group.
        env: extra environment variables for the ranks, or a function that returns them for a Worker.
        timeout: limit for the whole run in seconds, restarts included. None means no limit.
        heartbeat_timeout: the longest time in seconds without a call of `mpwatch.heartbeat()` or `mpwatch.report()`. The
            limit holds from the rank's first heartbeat or report on. A rank that exceeds this limit has failed
            (FailureKind.HANG). None means no limit.
        grace_period: seconds between SIGTERM and SIGKILL when a rank is stopped. A rank whose function has returned has the
            same time to exit.
        max_restarts: how many times all ranks are restarted after a failure. A RestartPolicy also says after which failures,
            and with which delays. The function must resume by itself, for example from a checkpoint.
            `current_worker().restart_count` counts the restarts.
        keep_going: True means that the ranks do not depend on each other: a rank that fails does not stop the other ranks,
            and with `max_restarts` only the failed rank is restarted. At the end RunFailedError says how many ranks failed,
            and `error.result` has the values of the other ranks.
        stop: signals to this process that ask all ranks to save and return, such as (signal.SIGUSR1, signal.SIGTERM). A
            StopPolicy also sets time limits.
        placement: the CPUs on which each rank runs: "cores", "numa" or a function. A Placement also says which GPUs each
            rank sees. None means all of them.
        logs: where stdout and stderr of the ranks go. See LogSpec. None means that they go to the caller's stdout and
            stderr. In a notebook, None means that the output is captured and shown in the calling cell.
        progress: live view of the `report()` calls of the ranks. None shows the view in a terminal or a notebook, from the
            first report on. True shows the view from the start. Without a terminal or a notebook, the view then consists of
            lines on stderr. False never shows the view.
        on_event: a function or several functions. `run` calls them in this thread with each `mpwatch.Event` except
            `events.Progressed`. A function that raises an exception gets no more events. A KeyboardInterrupt from a function
            ends the run. While a function runs, signals are deferred, except a second Ctrl-C.
        on_progress: the same for the events `events.Progressed`: the newest report of each rank, four times a second.
        rendezvous: how the nodes of a job on several machines find one another. See Rendezvous. Each node makes the same
            call, with the number of its own ranks as `nprocs`. None means that the run uses only this machine.
        debug: "locals" means that the frames of a rank's exception have the text of their local variables. Debuggers
            (`%debug`, `pdb.post_mortem`), pytest's `-l` and `traceback.TracebackException(capture_locals=True)` show them.
            The rank calls `repr` for the variables, for at most one second. A text has at most 2,000 characters, and a frame
            has at most 100 variables. The texts are not sent to other nodes. None is the default because variables can
            contain secrets. "post_mortem" means that a pdb prompt opens when a rank raises an exception, at the line that
            raised, and before any rank is stopped. Meanwhile the other ranks run or wait, and the command `rank N` shows the
            stack and the variables of rank N. When you leave the prompt (`q`), the run fails as without this option. Without
            a terminal or a notebook, mpwatch only logs a warning that no prompt can open.
        check: False means that `run` returns the result of a failed run, and raises no RunFailedError.

    Returns:
        A RunResult with the return values by rank. `result[3]` is the value of rank 3, and iteration yields the values in
        the order of ranks. In a job of several nodes, each node gets the values of its own ranks: see `RunResult.items`.

    Raises:
        RunFailedError: a rank failed. `__cause__` is the rank's own exception. A rank that exits without returning has
            failed, too.
        RunTimeoutError: `timeout` was exceeded, or the `timeout` of a StopPolicy after a request that was not a signal.
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
    options = CallOptions(
        args=args,
        kwargs=kwargs,
        backend=backend,
        env=env,
        timeout=timeout,
        heartbeat_timeout=heartbeat_timeout,
        grace_period=grace_period,
        max_restarts=max_restarts,
        keep_going=keep_going,
        stop=stop,
        placement=placement,
        logs=logs,
        progress=progress,
        on_event=on_event,
        on_progress=on_progress,
        rendezvous=rendezvous,
        debug=debug,
    )
    if isinstance(fn, WorkerSpec):  # the other parameters have their defaults, unless the caller has made a mistake
        defaults = {field.name: field.default for field in fields(WorkerSpec)}
        options = {name: value for name, value in options.items() if value is not defaults[name] and value != defaults[name]}  # type: ignore[assignment]
    result = _run(_make_spec("run", fn, nprocs, options))
    if check:
        raise_if_failed(result)
    return result


def _make_spec(
    function: str, fn: Callable[..., T] | WorkerSpec[T], nprocs: Nprocs | None, options: CallOptions
) -> WorkerSpec[T]:
    __tracebackhide__ = True
    if not isinstance(fn, WorkerSpec):
        if nprocs is None:
            raise TypeError(f"{function}() needs nprocs: a number of ranks, 'gpu', 'cpu' or 'auto'")
        refuse_unknown(function, options, CallOptions.__annotations__)
        return WorkerSpec(fn=fn, nprocs=nprocs, **options)
    if nprocs is not None or options:
        names = ", ".join([*(["nprocs"] if nprocs is not None else []), *options])
        raise TypeError(
            f"a WorkerSpec has all options of {function}(); pass dataclasses.replace(spec, ...) to change {names}"
        )
    return fn


def _run(spec: WorkerSpec[T], make_view: MakeView | None = None, **details: Any) -> RunResult[T]:
    __tracebackhide__ = True
    check_host()
    warn_of_memory(int(spec.nprocs))
    make_view = make_view or partial(select_view, spec.progress)
    if spec.rendezvous is None:
        return run_single_node(spec, make_view, **details)
    from mpwatch.nodes.run import run_multi_node

    return run_multi_node(spec, make_view, **details)


@overload
def submit(fn: WorkerSpec[T], *, check: bool = ...) -> "RunHandle[T]": ...
@overload
def submit(fn: Callable[..., T], nprocs: Nprocs, **options: Unpack[RunOptions]) -> "RunHandle[T]": ...


def submit(
    fn: Callable[..., T] | WorkerSpec[T], nprocs: Nprocs | None = None, *, check: bool = True, **options: Unpack[CallOptions]
) -> "RunHandle[T]":
    """Start a run in a new thread, and return at once, without waiting for the run.

    The arguments are those of `run`. They are pickled before `submit` returns. The thread of the run calls the functions
    that you pass as `on_event`, `on_progress`, `retry_if` and `env`. mpwatch installs no signal handlers for a run that
    `submit` starts. A program that ends does not wait for submitted runs. At the end of the program, mpwatch sends SIGTERM
    to the ranks of submitted runs. A rank that has not exited after `grace_period` gets SIGKILL.

    Returns:
        A RunHandle, which is a `concurrent.futures.Future` of the RunResult. It can also end and inspect the run.

    Raises:
        LaunchError: the function or its arguments cannot be pickled.
        TypeError, ValueError, RuntimeError: see `run`.
    """
    __tracebackhide__ = True
    check_flag("check", check)
    return start_run(_make_spec("submit", fn, nprocs, options), check=check)


def start_run(spec: WorkerSpec[T], make_view: MakeView | None = None, *, check: bool) -> "RunHandle[T]":
    """Start a run as `submit` does, with the live view that `make_view` returns, if not None."""
    from mpwatch.run_handle import RunHandle  # imports concurrent.futures

    __tracebackhide__ = True
    refuse_signals(spec)
    check_host()
    check_not_importing()
    payload = pack_spec(spec)
    handle = RunHandle(lambda _, on_start: _run(spec, make_view, payload=payload, on_start=on_start), check=check)
    add_call(handle, RunHandle._ask_to_stop)
    handle._enter_queue()
    handle._decide()  # from now on `cancel` returns False
    return handle


@overload
def main(fn: WorkerSpec[T]) -> RunResult[T]: ...
@overload
def main(fn: Callable[..., T], nprocs: Nprocs, **options: Unpack[CallOptions]) -> RunResult[T]: ...


def main(fn: Callable[..., T] | WorkerSpec[T], nprocs: Nprocs | None = None, **options: Unpack[CallOptions]) -> RunResult[T]:
    """Call `run`. If a rank fails, print the report on stderr, and end the program with that rank's exit status.

    Use `main` only in a program whose single task is the run, because `main` ends the program after a failure. The exit
    status comes from the rank that failed first. The exit status is 1 after an exception, 128 + n if signal n killed the
    rank, and 124 after a timeout. If the rank failed because it called `sys.exit(n)` or `os._exit(n)`, the exit status of
    the program is n. If the rank called `sys.exit(0)` or `os._exit(0)` before its function returned, the exit status of the
    program is 1.

    In a job of several nodes, `main` exits with the same status on every node, because some schedulers keep the status of
    only one node. If the program on a node receives a signal such as SIGTERM, the program dies of this signal.

    The arguments are those of `run`, except `check`.

    Returns:
        The result of `run`.

    Raises:
        SystemExit: a rank failed.
        LaunchError, TypeError, ValueError, KeyboardInterrupt: see `run`.
    """
    if "check" in options:
        raise TypeError("main() has no option 'check': a failure always ends the program; use run()")
    try:
        return run(_make_spec("main", fn, nprocs, options))
    except RunFailedError as error:
        cause = error.__cause__
        if cause is not None:
            print(clean_text("".join(traceback.format_exception(cause))), end="", file=sys.stderr)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
