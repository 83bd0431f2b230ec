"""Run one job on the nodes of a Ray cluster, from one call: `mpwatch.integrations.ray.run(train, 4, nodes=2)`.

cluster.py says how the driver and the nodes work together. This module starts the nodes: each is a task of Ray.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import mpwatch
from mpwatch import cluster

__all__ = ["RayEngine", "run"]

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    nprocs: Any,
    *,
    nodes: int | tuple[int, int],
    num_cpus: float | None = None,
    num_gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    join_timeout: float = 600.0,
    **options: Any,
) -> mpwatch.RunResult[T]:
    """Run a function on the ranks of several nodes of a Ray cluster, and return the results of all ranks.

    `ray.init()` must have been called. Each node of the job is a Ray task on a node of its own, and the ranks are its
    children. This process must be on a node of the cluster: a Ray client (`ray://`) is not.

    Args:
        fn: see `mpwatch.run`.
        nprocs: number of ranks of each node.
        nodes: the number of nodes, or the least and the greatest number.
        num_cpus: CPUs of each node that Ray reserves. None: one for each rank, or one if `nprocs` is a word.
        num_gpus: GPUs of each node that Ray reserves. The ranks see these GPUs only.
        resources: custom resources of each node that Ray reserves.
        runtime_env: of the Ray tasks.
        join_timeout: seconds that nodes wait for each other, and for the cluster to have room for them.
        options: other options of `mpwatch.cluster.run`.

    Raises: as `mpwatch.cluster.run`.
    """
    __tracebackhide__ = True
    if not ray.is_initialized():
        raise ValueError("there is no Ray cluster yet; call ray.init() first")
    least, most = (nodes, nodes) if isinstance(nodes, int) else nodes
    cpus = num_cpus if num_cpus is not None else float(nprocs) if isinstance(nprocs, int) else 1.0
    bundle = {"CPU": cpus, **({"GPU": num_gpus} if num_gpus else {}), **(resources or {})}
    engine = RayEngine(bundle, least, most, runtime_env=runtime_env, seconds=join_timeout)
    return cluster.run(
        engine, fn, nprocs, nodes=nodes, find_address=ray.util.get_node_ip_address, join_timeout=join_timeout, **options
    )


class RayEngine:
    """Starts each node of a job as a Ray task.

    Args:
        bundle: the resources of each node.
        least: the least number of nodes. Ray reserves the resources of all of them at once.
        most: the greatest number of nodes.
        runtime_env: of the tasks.
        seconds: how long to wait for the resources.

    Raises LaunchError if the cluster has no room for the least number of nodes.
    """

    def __init__(
        self,
        bundle: Mapping[str, float],
        least: int,
        most: int,
        *,
        runtime_env: Mapping[str, Any] | None = None,
        seconds: float = 600.0,
    ) -> None:
        self.address: str = ray.util.get_node_ip_address()
        self._refs: dict[int, Any] = {}
        self._bundle = dict(bundle)
        self._least = least
        self._most = most
        custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        self._options = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "resources": custom,
            "max_retries": 0,  # mpwatch restarts the ranks, and the driver starts another node
            "runtime_env": runtime_env,
        }
        self._remote = ray.remote(_call)
        self._groups = [placement_group([self._bundle] * least, strategy="STRICT_SPREAD")]
        if not self._groups[0].wait(seconds):
            self.close()
            raise mpwatch.LaunchError(
                f"the Ray cluster had no room for {least} nodes with {self._bundle} each for {seconds:g} s; see `ray status`"
            )

    def start(self, call: Callable[[], cluster.NodeOutcome], number: int) -> "Future[cluster.NodeOutcome]":
        """Call it in a Ray task, on a node of its own."""
        slot = number % self._most
        if slot < self._least:
            strategy: Any = PlacementGroupSchedulingStrategy(self._groups[0], placement_group_bundle_index=slot)
        else:
            strategy = "SPREAD"
        self._refs[number] = self._remote.options(**self._options, scheduling_strategy=strategy).remote(call)
        future: Future[cluster.NodeOutcome] = self._refs[number].future()
        return future

    def cancel(self, number: int) -> None:
        """Kill the process of the task, or remove it from Ray's queue."""
        with suppress(Exception):  # it has ended
            ray.cancel(self._refs[number], force=True)

    def close(self) -> None:
        """End all tasks, and release the resources."""
        for number in self._refs:
            self.cancel(number)
        self._refs.clear()
        for group in self._groups:
            remove_placement_group(group)


def _call(call: Callable[[], cluster.NodeOutcome]) -> cluster.NodeOutcome:
    return call()
