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
from mpwatch.live_view.select import MakeView, select_view
from mpwatch.options.backend import Backend
from mpwatch.options.log_spec import LogSpec
from mpwatch.options.placement import Cpus, Placement
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.options.spec import CallOptions, Debug, Env, Nprocs, Observers, ProgressObservers, RunOptions, WorkerSpec
from mpwatch.options.stop_policy import StopPolicy
from mpwatch.options.validation import check_flag, refuse_unknown
from mpwatch.results.run_result import RunResult
from mpwatch.results.texts import clean_text
from mpwatch.watcher.host_check import check_host
from mpwatch.watcher.pack_call import pack_spec
from mpwatch.watcher.registry import add_call
from mpwatch.watcher.restarts.run_controller import RunController
from mpwatch.watcher.signals import refuse_signals

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
    """Run `fn(*args, **kwargs)` in `nprocs` processes and return their results.

    Every rank is a child process of this one. When the first rank fails,
    mpwatch stops the others. When `run` returns or raises, every rank is dead
    and reaped, and no process is left in its Unix process group. Ctrl-Z
    suspends the ranks of a run in the main thread, too; no time limit counts
    that time.

    Args: the call
        fn: anything that cloudpickle can pickle, such as lambdas, closures and
            functions of a notebook; scripts need no `__main__` guard. Or a
            WorkerSpec, which has all options but `check`.
        nprocs: number of ranks, or "gpu" (one per GPU), "cpu" (one per CPU that
            this process may use), "auto" ("gpu" if there is a GPU, else "cpu").
        args: positional arguments, the same for every rank, except a `PerRank`.
            A rank learns who it is from `current_worker()`, the environment
            (RANK, LOCAL_RANK, WORLD_SIZE, ...) or torch.distributed.
        kwargs: keyword arguments.
        backend: the process group of torch.distributed during the call, such as
            "gloo", "nccl" or "auto" (nccl if there are GPUs, else gloo). A
            Backend also limits collectives. None: no process group.
        env: extra environment variables, or a function from a Worker to them.
        check: False returns the result of a failed run, and raises no
            RunFailedError.

    Args: limits
        timeout: seconds for the whole run, restarts included. None: no limit.
        heartbeat_timeout: seconds after which a rank without a `heartbeat()` or
            `report()` has failed (FailureKind.HANG), counted from its first one
            on. None: no limit.
        grace_period: seconds between SIGTERM and SIGKILL when a rank is
            stopped, and for the exit of a rank whose function has returned.

    Args: restarts
        max_restarts: how often all ranks are restarted after a failure. fn must
            resume by itself, for example from a checkpoint. A RestartPolicy
            also says after which failures, and with which delays.
        keep_going: True if ranks do not depend on each other: a failure stops
            no other rank, and only the failed rank is restarted. RunFailedError
            comes at the end; its `result` has the values of the others.
        stop: signals to this process that ask all ranks to save and return, for
            example (signal.SIGTERM,). A StopPolicy also has time limits.

    Args: output
        logs: where stdout and stderr of the ranks go: see LogSpec. None: to
            those of the caller, or into the notebook cell that made the call.
        progress: live view of `report()`. None: in a terminal or notebook, from
            the first report on. True: from the start, and without a terminal or
            notebook as lines on stderr. False: never.

    Args: looking inside
        on_event: a function, or several, that `run` calls in this thread with
            each `mpwatch.Event`, except `events.Progressed`. One that raises
            gets no more events.
        on_progress: the same for `events.Progressed`: the newest report of each
            rank, four times a second.
        debug: "locals" keeps the text of local variables (perhaps secrets) with
            the frames of a rank's exception. "post_mortem" opens a prompt of
            pdb where a rank raises, before any rank is stopped.

    Args: machines
        placement: the CPUs of each rank: "cores", "numa" or a function. A
            Placement also says which GPUs it sees. None: all of them.
        rendezvous: how the nodes of a job meet: see Rendezvous. Each node makes
            the same call, with its own `nprocs`. None: this machine alone.

    Returns:
        A RunResult. `result[3]` is the value of rank 3, and iteration yields
        the values in the order of ranks. On several nodes, each node gets the
        values of its own ranks: see `RunResult.items`.

    Raises:
        RunFailedError: a rank failed, or exited without returning. `__cause__`
            is the rank's own exception.
        RunTimeoutError: `timeout` was exceeded, or the `timeout` of a
            StopPolicy after a request that was not a signal.
        LaunchError: the ranks could not be started, and none is left; or the
            nodes have not met within `join_timeout` or `timeout`.
        TypeError, ValueError: an argument is not valid, or fn does not take
            these args and kwargs. No rank was started.
        RuntimeError: the call is made in a rank while the module of its
            function is imported. The new ranks would import it, too.
        KeyboardInterrupt: Ctrl-C. The ranks got SIGINT, too, and grace_period
            seconds to exit. Its note says where each was, and its last step.
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
    make_view = make_view or partial(select_view, spec.progress)
    if spec.rendezvous is None:
        return RunController(spec).run(make_view, **details)
    from mpwatch.nodes.run_controller import MultiNodeRunController

    return MultiNodeRunController(spec).run(make_view, **details)


@overload
def submit(fn: WorkerSpec[T], *, check: bool = ...) -> "RunHandle[T]": ...
@overload
def submit(fn: Callable[..., T], nprocs: Nprocs, **options: Unpack[RunOptions]) -> "RunHandle[T]": ...


def submit(
    fn: Callable[..., T] | WorkerSpec[T], nprocs: Nprocs | None = None, *, check: bool = True, **options: Unpack[CallOptions]
) -> "RunHandle[T]":
    """Start a run in a new thread, and return at once.

    The arguments are those of `run`, pickled before `submit` returns. The
    thread of the run calls `on_event`, `on_progress`, `retry_if` and `env`, and
    installs no signal handlers. A program that ends does not wait for submitted
    runs: their ranks get SIGTERM, and after `grace_period` SIGKILL.

    Returns:
        A RunHandle: a `concurrent.futures.Future` of the RunResult that can
            also end and inspect the run.

    Raises:
        LaunchError: the function or its arguments cannot be pickled.
        TypeError, ValueError, RuntimeError: see `run`.
    """
    __tracebackhide__ = True
    check_flag("check", check)
    spec = _make_spec("submit", fn, nprocs, options)
    refuse_signals(spec)
    handle = make_handle(spec, check=check)
    try:
        handle._start()
        handle._decide()  # from now on `cancel` returns False
    except BaseException:
        handle.terminate()
        raise
    return handle


def make_handle(spec: WorkerSpec[T], make_view: MakeView | None = None, *, check: bool) -> "RunHandle[T]":
    """Return the handle of a run that has not begun, with the live view that `make_view` returns, if not None."""
    from mpwatch.run_handle import RunHandle  # imports concurrent.futures

    __tracebackhide__ = True
    check_host()
    payload = pack_spec(spec)
    handle = RunHandle(lambda on_start: _run(spec, make_view, payload=payload, on_start=on_start), check=check)
    add_call(handle)
    return handle


@overload
def main(fn: WorkerSpec[T]) -> RunResult[T]: ...
@overload
def main(fn: Callable[..., T], nprocs: Nprocs, **options: Unpack[CallOptions]) -> RunResult[T]: ...


def main(fn: Callable[..., T] | WorkerSpec[T], nprocs: Nprocs | None = None, **options: Unpack[CallOptions]) -> RunResult[T]:
    """Call `run`; if a rank fails, print the report and exit with its status.

    For a program whose single task is the run. The report goes to stderr. The
    exit status is that of the rank that failed first: 1 after an exception, 128
    + n if signal n killed it, 124 after a timeout, n after `sys.exit(n)` or
    `os._exit(n)`, and 1 if n is 0, since the rank had not returned.

    On several nodes, the status is the same on every node, because some
    schedulers keep the status of only one. A program that receives a signal
    such as SIGTERM dies of it. The arguments are those of `run`, except
    `check`.

    Returns:
        The result of `run`.

    Raises:
        SystemExit: a rank failed.
        LaunchError, TypeError, ValueError, KeyboardInterrupt: see `run`.
    """
    try:
        return run(_make_spec("main", fn, nprocs, options))
    except RunFailedError as error:
        cause = error.__cause__
        if cause is not None:
            print(clean_text("".join(traceback.format_exception(cause))), end="", file=sys.stderr)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
