"""Starts a run of several nodes on this node. It is as watcher/run.py, with a NodeThread besides."""

import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import TypeVar

from mpwatch.nodes.node_thread import NodeThread
from mpwatch.nodes.run_controller import MultiNodeRunController
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.descriptors import open_standard_descriptors
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.caller import Caller
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.view_driver import MakeView, no_view
from mpwatch.watcher.run import pack_spec
from mpwatch.watcher.signal_options import check_stop_signals
from mpwatch.watcher.watcher import Watcher
from mpwatch.wire.pickling.call_payload import Payload

T = TypeVar("T")


def run_multi_node(
    spec: WorkerSpec[T],
    make_view: MakeView = no_view,
    *,
    payload: Payload | None = None,
    on_start: Callable[[Caller], object] | None = None,
) -> RunResult[T]:
    """Join the other nodes, and run the function with them until the job is over. See `run_single_node`."""
    __tracebackhide__ = True  # see mpwatch.run
    assert spec.rendezvous is not None
    check_stop_signals(spec)
    event_bus = EventBus(spec.rendezvous.run_id, spec, keep_events=True)
    with ExitStack() as resources:
        resources.enter_context(open_standard_descriptors())
        payload = resources.enter_context(closing(payload or pack_spec(spec)))
        run_deadline = math.inf if spec.timeout is None else event_bus.started_at + spec.timeout
        node_thread = NodeThread(spec, run_deadline)
        resources.callback(node_thread.release)
        watcher = Watcher(spec, event_bus, keep_ranks=False, node=node_thread)
        resources.callback(watcher.close_when_finished)
        resources.enter_context(closing(node_thread))
        watcher.output.use_current_streams()
        controller = MultiNodeRunController(spec, event_bus, node_thread)
        try:
            caller = Caller(watcher, make_view=make_view, ends_ranks=True)
            if on_start is not None:
                on_start(caller)
            caller.execute(partial(controller.follow_job, caller, payload))
            watcher.drain_output(caller.drain_timeout(controller.seconds_left()))
            result = caller.build_result(controller.build_result)
            if controller.job_decision is not None:
                node_thread.acknowledge_shutdown()
            elif len(caller.signals.received) > 1:  # the user asks for a faster end
                node_thread.finish_within(0.0)
        except BaseException as error:
            controller.end_with_error(error)
            raise
    try:
        event_bus.outbox.run_all()  # log records that the node thread has made while it ended
    finally:
        caller.deliver_signals(result, controller.list_evidence())
    return result
