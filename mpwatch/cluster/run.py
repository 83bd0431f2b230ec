"""`run` runs a job on a cluster: it checks the options, makes the server and the driver, and returns the result."""

import secrets
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, TypeVar, Unpack

import mpwatch
from mpwatch.cluster.driver import Driver
from mpwatch.cluster.engine import Engine
from mpwatch.cluster.job_server import JobServer
from mpwatch.cluster.node import NodeSpec
from mpwatch.cluster.view import JobView
from mpwatch.errors import make_error, raise_if_failed
from mpwatch.nodes.address import Endpoint
from mpwatch.options.rendezvous import as_node_range
from mpwatch.options.spec import NodeOptions, Nprocs, Observers, OutputOptions, ProgressObservers
from mpwatch.options.validation import check_flag, check_optional_seconds, refuse_unknown
from mpwatch.results.report import format_signal
from mpwatch.results.run_result import format_report
from mpwatch.watcher.pack_call import pack_spec
from mpwatch.wire.exceptions.decoder import add_note
from mpwatch.wire.pickling.pickler import pack_by_value

T = TypeVar("T")
ENGINE_METHODS = ("start", "cancel", "close")


class JobOptions(NodeOptions, OutputOptions, total=False):
    """The options of `run`, except those that an engine sets."""

    queue_timeout: float | None
    join_timeout: float
    node_timeout: float
    last_call_timeout: float
    check: bool


def check_nodes(nodes: object) -> tuple[int, int]:
    """Return the minimum and the maximum number of nodes that the option `nodes` allows. Raises TypeError or ValueError."""
    return as_node_range("nodes", nodes)


def run(
    engine: Engine,
    fn: Callable[..., T],
    nprocs: Nprocs,
    *,
    nodes: int | tuple[int, int],
    on_event: Observers | None = None,
    on_progress: ProgressObservers | None = None,
    logs: mpwatch.LogSpec | None = None,
    progress: bool | None = None,
    find_address: Callable[[], str] | None = None,
    queue_timeout: float | None = None,
    join_timeout: float = 600.0,
    node_timeout: float = 15.0,
    last_call_timeout: float = 10.0,
    check: bool = True,
    **options: Unpack[NodeOptions],
) -> mpwatch.RunResult[T]:
    """Run a function on the ranks of several nodes, and return the results of all ranks.

    Args:
        engine: starts the nodes. `run` closes the engine.
        fn: see `mpwatch.run`.
        nprocs: number of ranks of each node.
        nodes: the number of nodes, or (min, max). The job begins with min nodes and accepts new nodes up to max.
        on_event: a function or several functions. `run` calls them with each event of each node, in this thread.
        on_progress: the same for the events Progressed.
        logs: where the output of the ranks goes, see `mpwatch.LogSpec`. The calling program writes the shown lines. By
            default they begin with the number of the node and the rank, "[{node}:{rank}] ". `dir` is a folder on each node.
            None means that all lines are shown.
        progress: the live view of the ranks of all nodes, in the calling program. See `mpwatch.run`.
        find_address: returns the address of a node when it is called on this node. None means that mpwatch finds the
            address.
        queue_timeout: seconds that the job may wait until its first node has started and has connected to this program. The
            same limit applies to the first new node if all nodes are lost. None means no limit. Warnings say what the job
            waits for.
        join_timeout: seconds that a node waits for the other nodes after its start.
        node_timeout: seconds without a sign of life after which a node is lost.
        last_call_timeout: seconds to wait for more nodes after the minimum number of nodes has joined. More nodes may join
            later.
        check: whether a failed job raises an exception. False means that `run` returns the result of the failed job.
        options: the other options of `mpwatch.run`, except `rendezvous`, `debug="post_mortem"` and signals in `stop`.

    Raises:
        RunFailedError: a rank of any node failed, or all nodes were lost. `__cause__` is the rank's own exception.
        LaunchError: the nodes could not be started in time, or have not met in time. Or fn or its arguments cannot be
            pickled.
        TypeError, ValueError: an option is not valid.
        KeyboardInterrupt: the user pressed Ctrl-C. All ranks were stopped as by `mpwatch.run`. The note of the exception
            says where each rank was.
    """
    __tracebackhide__ = True  # see mpwatch.run
    if isinstance(engine, type) or not all(callable(getattr(engine, name, None)) for name in ENGINE_METHODS):
        raise TypeError(f"engine must be an object such as mpwatch.cluster.ThreadEngine(), not {engine!r:.200}")
    with ExitStack() as stack:
        stack.enter_context(closing(engine))
        check_nodes(nodes)
        check_flag("check", check)
        check_optional_seconds("queue_timeout", queue_timeout)
        if "rendezvous" in options:
            raise TypeError("a job on a cluster has no option 'rendezvous': the engine makes it")
        refuse_unknown("run", options, JobOptions.__annotations__)
        rendezvous = mpwatch.Rendezvous(
            str(Endpoint(engine.address, 1)),  # there is no port yet
            run_id=secrets.token_hex(4),
            nnodes=nodes,
            secret=secrets.token_hex(16),
            is_host=False,
            join_timeout=join_timeout,
            node_timeout=node_timeout,
            last_call_timeout=last_call_timeout,
        )
        shown = logs or mpwatch.LogSpec()
        spec: mpwatch.WorkerSpec[T] = mpwatch.WorkerSpec(
            fn=fn,
            nprocs=1 if isinstance(nprocs, str) else nprocs,  # the GPUs and CPUs of a node are counted there
            rendezvous=rendezvous,
            logs=shown,
            on_event=on_event,
            on_progress=on_progress,
            progress=progress,
            **options,
        )
        if spec.debug == "post_mortem":
            raise ValueError("debug='post_mortem': the nodes have no terminal; use debug='locals'")
        if spec.stop_policy.signals:
            raise ValueError(
                "stop has signals, but the nodes get no signals of the driver: call mpwatch.request_stop() in a rank, or "
                "use StopPolicy(after=...)"
            )
        call = _pack_call(spec, options)
        view = JobView(progress)
        stack.callback(view.close)
        server = stack.enter_context(closing(JobServer(engine.address, spec)))
        node_spec = NodeSpec(
            number=0,
            nprocs=nprocs,
            call=call,
            rendezvous=replace(rendezvous, endpoint=str(Endpoint(engine.address, server.port))),
            find_address=find_address,
            stop_signals=getattr(engine, "stop_signals", ()),
            log_options={name: getattr(shown, name) for name in ("dir", "show", "files", "prefix")},
            view_period=view.node_period,
            wants_progress=bool(spec.progress_observers),
        )
        driver = Driver(engine, server, view, shown, spec, queue_timeout=queue_timeout)
        result = driver.run(node_spec)
    if driver.interrupt is not None:
        _raise_interrupt(driver.interrupt, result)
    assert result is not None
    if check:
        raise_if_failed(result)
    return result


def _pack_call(spec: mpwatch.WorkerSpec[Any], options: NodeOptions) -> bytes:
    try:
        return pack_by_value((spec.fn, options))
    except Exception as error:
        pack_spec(spec).close()  # names the part of the call that cannot be pickled
        raise mpwatch.LaunchError(f"an option cannot be sent to the nodes: {type(error).__name__}: {error}") from error


def _raise_interrupt(interrupt: KeyboardInterrupt, result: mpwatch.RunResult[Any] | None) -> None:
    """With the error of a failed job as its cause, or the report of a stopped job as a note."""
    if result is not None and result.state is mpwatch.WorkerState.FAILED:
        raise interrupt from make_error(result)
    if result is not None and result.state is mpwatch.WorkerState.STOPPED:
        add_note(interrupt, format_report(replace(result, reason=format_signal(signal.SIGINT))))
    raise interrupt
