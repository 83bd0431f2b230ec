"""`Agent` replaces torch's elastic agent for programs that extend that agent or have their own RendezvousHandler.

`Agent` runs the same code as `mpwatch.run(..., rendezvous=...)`, and only adds a few methods. One thread calls `Agent.run`,
and any thread may call `Agent.get_worker_group`.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from mpwatch.errors import raise_if_failed
from mpwatch.events.types import Event, RendezvousCompleted, StateChanged
from mpwatch.live_view.select import select_view
from mpwatch.multinode.local_ranks import STOP_SHARE
from mpwatch.multinode.rank_assignment import build_assigned_workers
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.custom_handler import CustomHandlerClient
from mpwatch.multinode.run import run_multi_node
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.options.spec import WorkerSpec
from mpwatch.options.worker_info import Worker
from mpwatch.results.model import WorkerState
from mpwatch.results.run_result import RunResult

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WorkerGroupInfo(Generic[T]):
    """The ranks of one node of a job, at one moment. This class is like torch's `WorkerGroup`, but has no store."""

    spec: WorkerSpec[T]
    workers: tuple[Worker, ...] = ()
    """The ranks in the latest attempt. The tuple is empty until the first rendezvous is complete."""
    state: WorkerState = WorkerState.UNKNOWN
    """One state that describes all ranks of the node. When the run has ended, it is the state of the job."""
    group_rank: int | None = None
    """The number of this node in the latest attempt. It is None until the first rendezvous is complete."""
    group_world_size: int | None = None
    """The number of nodes in the latest attempt. It is None until the first rendezvous is complete."""


class Agent(Generic[T]):
    """Runs one node of a job. An Agent joins the other nodes, and starts, watches and restarts the ranks of its node.

    All nodes of the job restart their ranks together. The methods have the same names as in torch's class `ElasticAgent` in
    `torch.distributed.elastic.agent.server`. A torch agent is a separate process, but an mpwatch agent runs in the process
    that calls `run`. A single call of `mpwatch.run(..., rendezvous=...)` does the same as `Agent(spec).run()`.

        spec = WorkerSpec(fn=train, nprocs=8, rendezvous=Rendezvous("node0:29400", run_id="job", nnodes=(2, 4)))
        result = Agent(spec).run()

    Args:
        spec: what to run, with a `rendezvous`.
        rdzv_handler: the handler with which the nodes join. Pass a handler on all nodes or on no node. With a handler, the
            endpoint, backend and options of `spec.rendezvous` are ignored. The other fields of `spec.rendezvous` apply, and
            its run_id must be the run_id of the handler. The handler's settings say how many nodes the handler waits for,
            and for how long. The handler must return a new store for each round, as torch's dynamic rendezvous does. When
            the job is over, the agent closes the handler. Call `rdzv_handler.shutdown()` yourself to release the handler's
            resources. If nodes join later and the handler is torch's own, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the
            environment of all nodes.

    Raises:
        TypeError: `spec` or `rdzv_handler` has a wrong type.
        ValueError: `spec` has no rendezvous, or its run_id is not the handler's run_id, or the handler may count a node as
            lost while the ranks of that node still run.
    """

    def __init__(self, spec: WorkerSpec[T], *, rdzv_handler: RendezvousHandler | None = None) -> None:
        if not isinstance(spec, WorkerSpec):
            raise TypeError(f"spec must be a WorkerSpec, not {spec!r:.200}")
        if spec.rendezvous is None:
            raise ValueError(
                "spec has no rendezvous, so there are no other nodes: use mpwatch.run, or give spec a rendezvous"
            )
        if rdzv_handler is not None:
            _check_handler(rdzv_handler, spec.rendezvous)
        self._rdzv_handler = rdzv_handler
        self._group: WorkerGroupInfo[T] = WorkerGroupInfo(spec=spec)

    def run(self, *, check: bool = True) -> RunResult[T]:
        """Run the function together with the other nodes until the job is over.

        Args:
            check: raise RunFailedError if the job failed. See `mpwatch.run`, which also describes the result.
        """
        __tracebackhide__ = True
        spec = self._group.spec
        self._group = WorkerGroupInfo(spec=spec)
        watched = replace(spec, on_event=(self._observe, *spec.observers))
        result = run_multi_node(watched, partial(select_view, spec.progress), self._client())
        if check:
            raise_if_failed(result)
        return result

    def get_worker_group(self) -> WorkerGroupInfo[T]:
        """Return a description of the ranks that this node has now.

        You can call this method in any thread, and in your `on_event` function.
        """
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
                workers=build_assigned_workers(self._group.spec, event.ranks[0], **_get_assignment(event)),
                group_rank=event.group_rank,
                group_world_size=event.group_world_size,
            )


def _get_assignment(event: RendezvousCompleted) -> dict[str, Any]:
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
        raise ValueError(
            f"rdzv_handler has run_id {theirs!r}, and spec.rendezvous has {ours!r}, so they name different jobs: give"
            " both the same run_id"
        )
    if isinstance(handler, DynamicRendezvousHandler):
        settings = handler.settings
        # The node may have sent its last keep-alive just before it was cut off.
        seconds = (settings.keep_alive_max_attempt - 1) * settings.keep_alive_interval.total_seconds()
        if seconds < STOP_SHARE * rendezvous.node_timeout:
            raise ValueError(
                f"rdzv_handler may give up a node that is cut off for {seconds:g} s, but the node stops its ranks only after"
                f" {STOP_SHARE * rendezvous.node_timeout:g} s with node_timeout={rendezvous.node_timeout:g}: its ranks and"
                " those of the other nodes' next attempt could run at the same time. Give the handler more or longer"
                f" keep-alives, or set node_timeout={seconds / STOP_SHARE:.3g} at most"
            )
