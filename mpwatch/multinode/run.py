"""A run on one node of a job of several: as watch.py of the watcher, with a link to the other nodes."""

import math
from contextlib import closing
from functools import partial
from typing import TypeVar

from mpwatch.multinode.node_thread import NodeThread
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.run_controller import MultiNodeRunController
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.descriptors import standard_descriptors
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.commands import PendingCall
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.view_driver import MakeView, no_view
from mpwatch.watcher.pack_call import pack_call
from mpwatch.watcher.run import BlockingCall
from mpwatch.watcher.watcher_thread import WatcherThread
from mpwatch.wire.pickling.call_payload import Call

T = TypeVar("T")


def watch_with_others(
    spec: WorkerSpec[T], make_view: MakeView = no_view, client: RendezvousClient | None = None
) -> RunResult[T]:
    """Meet the other nodes, by that engine if there is one, and run it with them to its end.

    Raises LaunchError, or what the host's handler raises for a signal that came during the run: KeyboardInterrupt, say.
    """
    __tracebackhide__ = True  # see mpwatch.run
    assert spec.rendezvous is not None
    event_bus = EventBus(spec.rendezvous.run_id, spec.observers, keep=True)
    call = Call(spec.fn, tuple(spec.args), spec.kwargs or {}, spec.backend)
    run_by = math.inf if spec.timeout is None else event_bus.started_at + spec.timeout
    node_thread = NodeThread(spec, run_by, client)
    with (
        standard_descriptors(),
        closing(pack_call(call)) as payload,
        closing(WatcherThread(spec, event_bus, keep=False, on_verdict=node_thread.on_verdict)) as watcher_thread,
        closing(node_thread),
    ):
        controller = MultiNodeRunController(spec, event_bus, node_thread)
        blocking_call = BlockingCall(watcher_thread, partial(controller.judge, watcher_thread), make_view)
        try:
            watcher_thread.output.attach()
            pending_call = PendingCall(payload, event_bus.started_at, spec.timeout)
            controller.begin(pending_call)
            node_thread.begin(watcher_thread.commands)
            blocking_call.execute(pending_call, until=lambda: False)
            watcher_thread.settle(blocking_call.patience(controller.seconds_left()))
            blocking_call.raise_error()
            result = blocking_call.build_result(controller.result)
            if controller.is_concluded:
                node_thread.conclude()
            elif len(blocking_call.signals.received) > 1:  # somebody is in a hurry
                node_thread.leave(0.0)
        except BaseException as error:
            controller.fail(error)
            raise
    blocking_call.deliver_signals(result)
    return result
