"""From one notebook to a cluster of Ray's: one `mpwatch.run` on each of its nodes, and together they are one job.

`pip install "mpwatch[ray]"`, and `python examples/ray_nodes.py` makes a cluster of two nodes on this machine. On one of
yours, `ray.init(address="auto")` takes the place of `two_nodes_here()`; in a notebook all of it is the same.
"""

import secrets
from collections.abc import Callable
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import mpwatch

PORT = 29400  # of the store, on the first node
CPUS = 2  # of each node, one a rank


@ray.remote(num_cpus=CPUS, max_retries=0)  # mpwatch is who starts again what has failed
def node(train: Callable[..., Any], terms: dict[str, Any]) -> dict[int, Any]:
    """One of the job's: its ranks are children of this worker of Ray's. For GPUs: num_gpus above, nprocs="gpu" here."""
    rendezvous = mpwatch.Rendezvous(**terms, local_addr=ray.util.get_node_ip_address())
    result = mpwatch.run(train, nprocs=CPUS, backend="gloo", max_restarts=1, rendezvous=rendezvous)
    return result.return_values


def run_on_nodes(train: Callable[..., Any], nnodes: int) -> list[Any]:
    """What the ranks return, in their order. Raises what `mpwatch.run` raises, in Ray's words."""
    group = placement_group([{"CPU": CPUS}] * nnodes, strategy="STRICT_SPREAD")  # each on another node
    try:
        ray.get(group.ready())
        on = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n) for n in range(nnodes)]
        first = ray.get(address.options(scheduling_strategy=on[0]).remote())
        terms = {
            "endpoint": f"{first}:{PORT}",
            "run_id": f"ray-{secrets.token_hex(4)}",
            "nnodes": nnodes,
            "secret": secrets.token_hex(16),
        }
        calls = [node.options(scheduling_strategy=on[n]).remote(train, {**terms, "is_host": n == 0}) for n in range(nnodes)]
        values = {rank: value for of_node in ray.get(calls) for rank, value in of_node.items()}
        return [values[rank] for rank in sorted(values)]
    finally:
        remove_placement_group(group)


@ray.remote(num_cpus=1)
def address() -> str:
    """Of the node that this is called on."""
    return str(ray.util.get_node_ip_address())


def two_nodes_here() -> Any:
    """A cluster for who has none: two nodes on this machine, which differ in nothing but their names."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS})
    cluster.add_node(num_cpus=CPUS)
    ray.init(address=cluster.address)
    return cluster


def train() -> str:
    """What each rank does."""
    me = mpwatch.current_worker()
    total = torch.tensor(float(me.rank))
    dist.all_reduce(total)
    return f"rank {me.rank} of {me.world_size}, on node {me.group_rank}: the sum of all ranks is {total:g}"


if __name__ == "__main__":
    cluster = two_nodes_here()
    try:
        print(*run_on_nodes(train, 2), sep="\n")
    finally:
        ray.shutdown()
        cluster.shutdown()
