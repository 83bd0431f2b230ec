"""Starts a run of several nodes on this node.

This module is like watcher/run.py, but uses a NodeThread to communicate with the other nodes.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar

from mpwatch.multinode.node_thread import NodeThread
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.run_controller import MultiNodeRunController
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.descriptors import open_standard_descriptors
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.handler_errors import run_until_handler_raises
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.view_driver import MakeView, no_view
from mpwatch.watcher.pending_call import PendingCall
from mpwatch.watcher.run import BlockingCall, pack_spec
from mpwatch.watcher.signal_options import check_signal_options
from mpwatch.watcher.watcher_thread import WatcherThread
from mpwatch.wire.pickling.call_payload import Payload

T = TypeVar("T")


def run_multi_node(
    spec: WorkerSpec[T],
    make_view: MakeView = no_view,
    client: RendezvousClient | None = None,
    *,
    payload: Payload | None = None,
    on_start: Callable[[BlockingCall], object] | None = None,
) -> RunResult[T]:
    """Join the other nodes, and run the function with them until the job is over.

    Args:
        spec: the options of the run, with a `rendezvous`.
        make_view: makes the live view.
        client: the rendezvous of this node. If it is None, `spec.rendezvous` describes the rendezvous.
        payload: see `run_single_node`.
        on_start: see `run_single_node`.

    Raises LaunchError. If a signal such as SIGINT comes during the run, the calling program's handler for this signal runs
    at the end of the run. If the handler raises an exception, such as KeyboardInterrupt, `run_multi_node` raises the same
    exception.
    """
    __tracebackhide__ = True  # see mpwatch.run
    assert spec.rendezvous is not None
    check_signal_options(spec)
    event_bus = EventBus(spec.rendezvous.run_id, spec.observers, keep_events=True)
    with ExitStack() as resources:
        watcher_thread, node_thread, pending_call = run_until_handler_raises(
            partial(_prepare, spec, event_bus, client, payload, resources)
        )
        controller = MultiNodeRunController(spec, event_bus, node_thread)
        blocking_call = BlockingCall(watcher_thread, partial(controller.handle_ended_attempts, watcher_thread), make_view)
        try:
            if on_start is not None:
                on_start(blocking_call)
            controller.begin(pending_call)
            node_thread.start(watcher_thread.commands, watcher_thread.deferred_log)
            blocking_call.execute(pending_call, until=lambda: False)
            watcher_thread.drain_output(blocking_call.drain_timeout(controller.seconds_left()))
            blocking_call.raise_error()
            result = blocking_call.build_result(controller.build_result)
            if controller.is_job_decided:
                node_thread.acknowledge_shutdown()
            elif len(blocking_call.signals.received) > 1:  # the user asks for a faster end
                node_thread.finish_within(0.0)
        except BaseException as error:
            controller.end_with_error(error)
            raise
    try:
        watcher_thread.deferred_log.emit()  # log records that the node thread has made while it ended
    finally:
        blocking_call.deliver_signals(result)
    return result


def _prepare(
    spec: WorkerSpec[Any],
    event_bus: EventBus,
    client: RendezvousClient | None,
    payload: Payload | None,
    resources: ExitStack,
) -> tuple[WatcherThread, NodeThread, PendingCall]:
    """Make all objects that must exist before the threads start. `resources` closes these objects."""
    resources.enter_context(open_standard_descriptors())
    payload = resources.enter_context(closing(payload or pack_spec(spec)))
    run_deadline = math.inf if spec.timeout is None else event_bus.started_at + spec.timeout
    node_thread = NodeThread(spec, run_deadline, client)
    watcher_thread = resources.enter_context(
        closing(
            WatcherThread(
                spec,
                event_bus,
                keep_ranks=False,
                on_outcome_change=node_thread.on_outcome_change,
                on_stall=node_thread.on_stall,
                on_stop=node_thread.on_stop,
                on_steps_held=node_thread.on_steps_held,
            )
        )
    )
    resources.enter_context(closing(node_thread))
    watcher_thread.output.use_current_streams()
    return watcher_thread, node_thread, PendingCall(payload, event_bus.started_at, spec.timeout, spec.stop_after)
