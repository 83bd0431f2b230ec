"""Run one job on the nodes of a Ray cluster, from one call: `mpwatch.integrations.ray.run(train, 4, nodes=2)`.

mpwatch/cluster/__init__.py describes how the driver and the nodes work together. Each node of the job is one Ray task, which
runs in one bundle of a Ray placement group.

    group of the job         min nodes, reserved all at once, each on a node of its own (STRICT_SPREAD)
    group of a further node  one bundle, on a node that the job does not use yet; waits until there is one

If the job loses a Ray node, Ray reserves the bundle of the lost node again, on another Ray node. If a bundle of the job's
placement group has no running task, RayEngine starts the next task in this bundle. A thread waits for each task.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar, Unpack

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import mpwatch
from mpwatch import cluster

__all__ = ["run"]

T = TypeVar("T")
CLOSE_SECONDS = 10.0  # for the tasks to end, and for Ray to remove a placement group
OMP_THREADS = "OMP_NUM_THREADS"
# For Ray to reserve resources, before the next look at whether a node is cancelled. Ray 2.60 rounds it down to a whole
# number, and an answer hardly ever comes within 0 s.
WAIT_SECONDS = 1
log = logging.getLogger("mpwatch")


def run(
    fn: Callable[..., T],
    nprocs: int | Literal["auto", "cpu", "gpu"],
    *,
    nodes: int | tuple[int, int],
    num_cpus: float | None = None,
    num_gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    **options: Unpack[cluster.JobOptions],
) -> mpwatch.RunResult[T]:
    """Run a function on the ranks of several nodes of a Ray cluster, and return the results of all ranks.

    Call `ray.init()` before you call `run`. Each node of the job is one Ray task, and each of these tasks runs on a
    different Ray node. The ranks of a node are child processes of its Ray task. The program that calls `run` must itself run
    on a node of the Ray cluster. A program that connects to the cluster with Ray Client (`ray://`) cannot use `run`.

    Args:
        fn: see `mpwatch.run`.
        nprocs: number of ranks of each node, as for `mpwatch.run`.
        nodes: the number of nodes, or (min, max). The job begins with min nodes and accepts new nodes up to max.
        num_cpus: number of CPUs that Ray reserves on each node. None means one CPU for each rank. If `nprocs` is a word,
            None means one CPU for each node.
        num_gpus: number of GPUs that Ray reserves on each node. The ranks see only these GPUs.
        resources: custom resources that Ray reserves on each node.
        runtime_env: the runtime_env of the Ray tasks.
        options: other options of `mpwatch.cluster.run`. If `queue_timeout` is not set, the job waits without limit until the
            cluster has room for min nodes at the same time.

    Raises: see `mpwatch.cluster.run`.
    """
    __tracebackhide__ = True
    if not ray.is_initialized():
        raise ValueError("there is no Ray cluster yet; call ray.init() first")
    cpus = num_cpus if num_cpus is not None else float(nprocs) if isinstance(nprocs, int) else 1.0
    bundle = {"CPU": cpus, "GPU": num_gpus, **(resources or {})}
    bundle = {name: amount for name, amount in bundle.items() if amount}
    least, _ = cluster.check_nodes(nodes)
    engine = RayEngine(bundle, least, runtime_env=runtime_env)
    return cluster.run(engine, fn, nprocs, nodes=nodes, find_address=ray.util.get_node_ip_address, **options)


class RayEngine(cluster.ThreadEngine):
    """Executes each call as a Ray task with the resources `bundle`, and waits for it in a thread. The resources of the
    minimum number of nodes are reserved in one step.
    """

    def __init__(self, bundle: Mapping[str, float], least: int, *, runtime_env: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.address = ray.util.get_node_ip_address()
        self._bundle, self._least = dict(bundle), least
        custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        self._options = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "resources": custom,
            "max_retries": 0,  # mpwatch restarts the ranks, and the driver starts another node
            "runtime_env": runtime_env,
        }
        self._remote = ray.remote(_call)
        self._group: PlacementGroup | None = None
        self._free_slots = list(range(least))  # bundles of the job's group without a task
        self._further_groups: dict[int, PlacementGroup] = {}  # by number of the node
        self._placing = threading.Lock()  # one further node after the other is placed
        self._refs: dict[int, Any] = {}  # of the tasks that run
        self._cancelled: set[int] = set()

    def describe_wait(self) -> str:
        """Ask Ray to reserve resources for the minimum number of nodes, and return what the job waits for, or ""."""
        if self._group is None:
            self._group = placement_group([self._bundle] * self._least, strategy="STRICT_SPREAD")
        if self._futures or self._group.wait(WAIT_SECONDS):
            return ""
        nodes = f"the nodes of the job ({self._least}, with {self._bundle} each)"
        return f"the Ray cluster has no room for {nodes}; see `ray status`"

    def start(self, call: Callable[[], cluster.NodeOutcome], number: int) -> "Future[cluster.NodeOutcome]":
        if self._free_slots:
            return super().start(partial(self._execute_in_slot, call, number, self._free_slots.pop(0)), number)
        return super().start(partial(self._execute_on_further_node, call, number), number)

    def cancel(self, number: int) -> None:
        """Kill the process of the node's Ray task. If the task has not begun, remove the task from Ray's queue."""
        self._cancelled.add(number)
        if (ref := self._refs.get(number)) is not None:
            with suppress(Exception):  # it has ended
                ray.cancel(ref, force=True)

    def close(self) -> None:
        try:
            for number in self._futures:
                self.cancel(number)
            wait(self._futures.values(), CLOSE_SECONDS)
        finally:  # an impatient user may press Ctrl-C once more; a task that is left ends with its group
            for group in (self._group, *self._further_groups.values()):
                if group is not None:
                    _remove(group)

    # --- In the thread of a node

    def _execute_in_slot(self, call: Callable[[], cluster.NodeOutcome], number: int, slot: int) -> cluster.NodeOutcome:
        assert self._group is not None, "call describe_wait() first"
        try:
            return self._execute(call, number, self._group, slot)
        finally:
            self._free_slots.append(slot)

    def _execute_on_further_node(self, call: Callable[[], cluster.NodeOutcome], number: int) -> cluster.NodeOutcome:
        """Reserve resources on a Ray node that the job does not use yet, and wait until there is one."""
        try:
            with self._placing:
                if number in self._cancelled:
                    raise CancelledError
                other_node = {"ray.io/node-id": f"!in({','.join(sorted(self._find_used_nodes()))})"}  # Ray keeps blanks
                group = placement_group([self._bundle], bundle_label_selector=[other_node])
                self._further_groups[number] = group
                while number not in self._cancelled and not group.wait(WAIT_SECONDS):
                    pass
            return self._execute(call, number, group, 0)
        finally:
            if (own := self._further_groups.pop(number, None)) is not None:
                _remove(own)  # if its node is lost, Ray would reserve its bundle again

    def _execute(
        self, call: Callable[[], cluster.NodeOutcome], number: int, group: PlacementGroup, slot: int
    ) -> cluster.NodeOutcome:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=slot)
        self._refs[number] = self._remote.options(**self._options, scheduling_strategy=strategy).remote(call)
        try:
            if number in self._cancelled:  # perhaps just before there was a task
                self.cancel(number)
            outcome: cluster.NodeOutcome = ray.get(self._refs[number])
            return outcome
        finally:
            del self._refs[number]

    def _find_used_nodes(self) -> set[str]:
        groups = [self._group, *self._further_groups.values()]
        tables = [placement_group_table(group) for group in groups if group is not None]
        return {node for table in tables for node in table.get("bundles_to_node_id", {}).values() if node}


def _call(call: Callable[[], cluster.NodeOutcome]) -> cluster.NodeOutcome:
    """Ray sets OMP_NUM_THREADS to the CPUs of the task, which is too much for each of several ranks. It is deleted
    meanwhile, so that mpwatch's own default holds.
    """
    context = ray.get_runtime_context()
    cpus = context.get_assigned_resources().get("CPU", 0)
    is_set_by_user = OMP_THREADS in context.runtime_env.get("env_vars", {})
    threads = os.environ.get(OMP_THREADS)
    if threads is None or is_set_by_user or threads != str(max(1, int(cpus))):
        return call()
    del os.environ[OMP_THREADS]
    try:
        return call()
    finally:
        os.environ[OMP_THREADS] = threads  # Ray removes it


def _remove(group: PlacementGroup) -> None:
    """Remove a placement group in a separate thread, because Ray's function for it has no timeout and can hang."""
    thread = threading.Thread(target=remove_placement_group, args=(group,), name="mpwatch removal", daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)
    if thread.is_alive():
        log.warning("Ray has not removed placement group %s within %g s", group.id.hex(), CLOSE_SECONDS)
