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
    spec: WorkerSpec[T], make_view: MakeView = no_view, engine: RendezvousClient | None = None
) -> RunResult[T]:
    """Meet the other nodes, by that engine if there is one, and run it with them to its end.

    Raises LaunchError, or what the host's handler raises for a signal that came during the run: KeyboardInterrupt, say.
    """
    __tracebackhide__ = True  # see mpwatch.run
    assert spec.rendezvous is not None
    journal = EventBus(spec.rendezvous.run_id, spec.observers, keep=True)
    call = Call(spec.fn, tuple(spec.args), spec.kwargs or {}, spec.backend)
    run_by = math.inf if spec.timeout is None else journal.started_at + spec.timeout
    link = NodeThread(spec, run_by, engine)
    with (
        standard_descriptors(),
        closing(pack_call(call)) as payload,
        closing(WatcherThread(spec, journal, keep=False, herald=link.herald)) as life,
        closing(link),
    ):
        story = MultiNodeRunController(spec, journal, link)
        visit = BlockingCall(life, partial(story.judge, life), make_view)
        try:
            life.output.attach()
            errand = PendingCall(payload, journal.started_at, spec.timeout)
            story.begin(errand)
            link.begin(life.mailbox)
            visit.pay(errand, until=lambda: False)
            life.settle(visit.patience(story.seconds_left()))
            visit.raise_error()
            result = visit.conclude(story.result)
            if story.is_concluded:
                link.conclude()
            elif len(visit.signals.received) > 1:  # somebody is in a hurry
                link.leave(0.0)
        except BaseException as error:
            story.fail(error)
            raise
    visit.deliver_signals(result)
    return result
