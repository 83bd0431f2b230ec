"""What an elastic agent is here, for those who extend one, or have a rendezvous of their own: `Agent`, in torch's words.

Thin: the run is that of `mpwatch.run(..., rendezvous=...)`, and who its ranks are is known from its events. For the thread
that calls `run`; `get_worker_group` is for any.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from mpwatch.errors import raise_if_failed
from mpwatch.events.types import Event, RendezvousCompleted, StateChanged
from mpwatch.live_view.select import view_for
from mpwatch.multinode.local_ranks import STOP_SHARE
from mpwatch.multinode.rank_assignment import workers_of
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.custom_handler import CustomHandlerClient
from mpwatch.multinode.run import watch_with_others
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.options.spec import WorkerSpec
from mpwatch.options.worker_info import Worker
from mpwatch.results.model import WorkerState
from mpwatch.results.run_result import RunResult

__all__ = ["Agent", "WorkerGroupInfo"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WorkerGroupInfo(Generic[T]):
    """The ranks of one node of a job, as they are at one moment. What torch's `WorkerGroup` says, but for its store: what is
    in that is between the nodes.
    """

    spec: WorkerSpec[T]
    workers: tuple[Worker, ...] = ()
    """Who they are in the latest attempt; none until the nodes have met."""
    state: WorkerState = WorkerState.UNKNOWN
    """Of all of them together; the end of the job's, in the end."""
    group_rank: int | None = None
    """Of this node in the latest attempt; None until the nodes have met."""
    group_world_size: int | None = None
    """How many nodes there are in it."""


class Agent(Generic[T]):
    """One node of a job: it meets the others, starts its own ranks, watches them, and decides with the others what follows.

    The name, and those of its methods, are torch's (`torch.distributed.elastic.agent.server.ElasticAgent`). There an agent
    is a process of its own; here it is whoever calls `run`. `mpwatch.run(..., rendezvous=...)` is the same in one call.

        spec = WorkerSpec(fn=train, nprocs=8, rendezvous=Rendezvous("node0:29400", run_id="job", nnodes=(2, 4)))
        result = Agent(spec).run()

    Args:
        spec: what to run, with a `rendezvous`.
        rdzv_handler: by which the nodes meet, instead of where `spec.rendezvous` says: its endpoint, backend and options are
            not looked at then; all else in it holds, and its run_id must be the handler's. All nodes must have one, and each
            round a store of its own, as with torch's dynamic rendezvous. How many nodes it waits for, and how long, its
            own settings say. It stays yours: when the job is over it has been closed, and `rdzv_handler.shutdown()`, which
            gives back what it holds, is for you to call. Torch's own handlers can take in a node that comes later (a
            newcomer, or one in the place of another) only if all nodes have TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in their
            environment.

    Raises TypeError or ValueError if there is no rendezvous, or it is another one than the handler's, or the handler gives
    up nodes that may still be at work.
    """

    def __init__(self, spec: WorkerSpec[T], *, rdzv_handler: RendezvousHandler | None = None) -> None:
        if not isinstance(spec, WorkerSpec):
            raise TypeError(f"spec must be a WorkerSpec, not {spec!r:.200}")
        if spec.rendezvous is None:
            raise ValueError("spec has no rendezvous, so there are no other nodes: use mpwatch.run, or say where they meet")
        if rdzv_handler is not None:
            _check_handler(rdzv_handler, spec.rendezvous)
        self._rdzv_handler = rdzv_handler
        self._group: WorkerGroupInfo[T] = WorkerGroupInfo(spec=spec)

    def run(self, *, check: bool = True) -> RunResult[T]:
        """Run it, with the others, to the end of the job. For `check`, and what comes of it, see `mpwatch.run`."""
        __tracebackhide__ = True
        spec = self._group.spec
        self._group = WorkerGroupInfo(spec=spec)
        watched = replace(spec, on_event=(self._observe, *spec.observers))
        result = watch_with_others(watched, partial(view_for, spec.progress), self._client())
        if check:
            raise_if_failed(result)
        return result

    def get_worker_group(self) -> WorkerGroupInfo[T]:
        """This node's ranks, as they are now. From any thread, and from an `on_event` of the run."""
        return self._group

    def _client(self) -> RendezvousClient | None:
        rendezvous = self._group.spec.rendezvous
        assert rendezvous is not None
        return None if self._rdzv_handler is None else CustomHandlerClient(rendezvous, self._rdzv_handler)

    def _observe(self, event: Event) -> None:
        if isinstance(event, StateChanged):
            self._group = replace(self._group, state=event.after)
        elif isinstance(event, RendezvousCompleted):
            self._group = replace(
                self._group,
                workers=workers_of(self._group.spec, event.ranks[0], **_standing(event)),
                group_rank=event.group_rank,
                group_world_size=event.group_world_size,
            )


def _standing(event: RendezvousCompleted) -> dict[str, Any]:
    names = ("attempt", "job", "group_rank", "group_world_size", "world_size", "role_rank", "role_world_size")
    return {name: getattr(event, name) for name in (*names, "master_addr", "master_port")}


def _check_handler(handler: object, rendezvous: Rendezvous) -> None:
    if not isinstance(handler, RendezvousHandler):
        raise TypeError(
            "rdzv_handler must be a torch.distributed.elastic.rendezvous.RendezvousHandler, as get_rendezvous_handler makes"
            f" one, not {handler!r:.200}"
        )
    theirs, ours = handler.get_run_id(), rendezvous.run_id
    if theirs != ours:
        raise ValueError(f"rdzv_handler is of run_id {theirs!r}, and spec.rendezvous of {ours!r}: give both the same one")
    if isinstance(handler, DynamicRendezvousHandler):
        settings = handler.settings
        # The last sign of life may have been given just before the node was cut off.
        sure = (settings.keep_alive_max_attempt - 1) * settings.keep_alive_interval.total_seconds()
        if sure < STOP_SHARE * rendezvous.node_timeout:
            raise ValueError(
                f"rdzv_handler may give up a node that has been cut off for {sure:g} s, which stops its ranks only after"
                f" {STOP_SHARE * rendezvous.node_timeout:g} s with node_timeout={rendezvous.node_timeout:g}: two jobs would"
                f" be at work. Give it more or longer keep-alives, or node_timeout={sure / STOP_SHARE:.3g} at most"
            )
