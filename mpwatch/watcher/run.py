"""Runs a function on the ranks of one node. From `mpwatch.run` to the process of a rank:

    api.run -> run_single_node -> RunController.run -> EventLoop.start -> ProcessPool.start -> process

and back: EventLoop (Call.evidence) -> RunController: diagnose, decide about a restart -> build_result -> api.run.
"""

import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar

from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.descriptors import open_standard_descriptors
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.caller import Caller
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.view_driver import MakeView, no_view
from mpwatch.watcher.pack_call import pack_call
from mpwatch.watcher.restarts.run_controller import RunController
from mpwatch.watcher.signal_options import check_stop_signals
from mpwatch.watcher.watcher import Watcher
from mpwatch.wire.pickling.call_payload import FunctionCall, Payload

T = TypeVar("T")


def run_single_node(
    spec: WorkerSpec[T],
    make_view: MakeView = no_view,
    *,
    payload: Payload | None = None,
    on_start: Callable[[Caller], object] | None = None,
) -> RunResult[T]:
    """Run a function on all ranks. When this returns or raises, no rank is left, and `payload` is closed.

    `on_start` is called with the Caller before the ranks are started.
    """
    __tracebackhide__ = True  # see mpwatch.run
    check_stop_signals(spec)
    controller = RunController(spec, EventBus(uuid.uuid4().hex, spec, keep_events=True))
    try:
        with ExitStack() as resources:
            resources.enter_context(open_standard_descriptors())
            payload = resources.enter_context(closing(payload or pack_spec(spec)))
            watcher = Watcher(spec, controller.event_bus, keep_ranks=False)
            resources.callback(watcher.close_when_finished)
            setups = watcher.prepare(range(int(spec.nprocs)), 0)
            watcher.output.use_current_streams()
            caller = Caller(watcher, make_view=make_view, ends_ranks=True)
            if on_start is not None:
                on_start(caller)
            caller.execute(partial(controller.run, caller, payload, setups))
            watcher.drain_output(caller.drain_timeout(controller.seconds_left()))
        result = caller.build_result(controller.build_result)
    except BaseException as error:
        controller.end_with_error(error)
        raise
    caller.deliver_signals(result, controller.list_evidence())
    return result


def pack_spec(spec: WorkerSpec[Any]) -> Payload:
    backend = spec.torch_backend
    return pack_call(
        FunctionCall(spec.fn, tuple(spec.args), spec.kwargs or {}, backend.name, backend_timeout=backend.timeout)
    )
