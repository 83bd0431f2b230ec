"""`run` and `main`: make a WorkerSpec of the options, have the watcher run it, and raise an error if a rank failed."""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from mpwatch.errors import RunFailedError, raise_if_failed
from mpwatch.live_view.select import view_for
from mpwatch.options.log_spec import LogSpec
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.options.spec import Nprocs, Observers, WorkerSpec
from mpwatch.options.validation import check_flag
from mpwatch.options.worker_info import Worker
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.run import watch

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
    role: str = "default",
    logs: LogSpec | None = None,
    on_event: Observers | None = None,
    progress: bool | None = None,
    rendezvous: Rendezvous | None = None,
    check: bool = True,
) -> RunResult[T]:
    """Call `fn(*args, **kwargs)` in `nprocs` processes, watch them to their end, and return what they returned.

    Every rank is a child of this process. On the first failure the others are stopped, and when this returns or raises,
    all of them, and what they started in their process groups, are dead and reaped.

    Args:
        fn: any callable that can be sent: a function of a module, a script, a notebook cell; a lambda, closure, partial,
            bound method or callable object. `__main__` is not imported again, and needs no guard.
        nprocs: number of ranks; "gpu": one a GPU; "cpu": one a CPU that this process may use; "auto": GPUs if there are
            any, else CPUs.
        args: positional arguments, the same for every rank; who a rank is, it asks of `current_worker()`, of the
            environment (RANK, LOCAL_RANK, WORLD_SIZE, ...) or of torch.distributed.
        kwargs: keyword arguments.
        backend: of torch.distributed ("gloo", "nccl", ...; "auto": nccl with GPUs, else gloo): the default process group
            is made before fn is called and destroyed after it. None: fn does as it likes.
        env: extra environment variables for the ranks, or a function that gives them for a Worker.
        timeout: seconds for the whole run, restarts included, then RunTimeoutError. None: no limit.
        heartbeat_timeout: seconds that a rank may go without `mpwatch.heartbeat()` or `mpwatch.report()`, from its first one
            on; then it hangs, and has failed (FailureKind.HANG). None: no limit.
        grace_period: seconds that a rank has between SIGTERM and SIGKILL when it is stopped, and for ending by itself
            after it has returned.
        start_timeout: seconds that an interpreter may take to start; a rank that takes longer has failed, too
            (FailureKind.START).
        max_restarts: how often all ranks are started again after a failure: short for RestartPolicy(max_restarts). None:
            never, unless restart_policy says otherwise.
        restart_policy: how often, which ranks, after which failures and delays, see RestartPolicy. A rank has to resume by
            itself, from its last checkpoint; `current_worker().restart_count` says which time it is.
        role: name of this kind of worker.
        logs: where the ranks' stdout and stderr go: see LogSpec. None: they have the caller's own; in a notebook they are
            captured, and shown in the cell that runs.
        on_event: a function, or several, called in this thread with each `mpwatch.Event`; one that raises is dropped.
            While it runs, signals wait, but for a second Ctrl-C.
        progress: a live view of what the ranks `report()`: None: in a terminal or a notebook, once one of them has reported;
            True: from the start, and as plain lines on stderr where there is neither; False: never.
        rendezvous: where the nodes of a job meet, for ranks on several machines: each makes the same call, and `nprocs` is
            how many ranks this one has. See Rendezvous. None: this machine alone.
        check: False: return the result of a failed run instead of raising.

    Returns:
        The values by rank: `result[3]` is rank 3's, iterating gives them in order. Of a job of several nodes each has those
        of its own ranks, by global rank.

    Raises:
        RunFailedError: a rank failed; raised from that rank's own exception. A rank that ended without returning failed.
        RunTimeoutError: `timeout` ran out.
        LaunchError: the ranks could not be started; none is left. With `rendezvous`: or the nodes have not met in
            `join_timeout`, or before `timeout` ran out.
        TypeError, ValueError: an argument is not what it should be.
        KeyboardInterrupt: Ctrl-C; the ranks got it too, and had grace_period seconds to end.
    """
    __tracebackhide__ = True  # of IPython and pytest: what they show of an error is the user's own code
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
        role=role,
        logs=logs,
        on_event=on_event,
        progress=progress,
        rendezvous=rendezvous,
    )
    if rendezvous is None:
        result = watch(spec, partial(view_for, progress))
    else:
        from mpwatch.multinode.run import watch_with_others  # imports torch

        result = watch_with_others(spec, partial(view_for, progress))
    if check:
        raise_if_failed(result)
    return result


def main(fn: Callable[..., T], nprocs: Nprocs = "auto", **options: Any) -> RunResult[T]:
    """As `run`, for a program that is nothing but the run: if a rank fails, the program ends with that rank's status.

    The report goes to stderr, and the exit status is the failed rank's own: that of sys.exit or os._exit, 128 + n for
    signal n, 1 for an exception, 124 for a timeout. In a job of several nodes it is, on each of them, that of the rank that
    failed first, wherever that was: schedulers keep the status of one node, and that is then the one that says why. (Under
    torchrun it is 1.) A node that is ended by a signal dies of it.

    Args:
        fn: see `run`.
        nprocs: see `run`.
        options: those of `run`, but for `check`.

    Raises:
        SystemExit: a rank failed.
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
