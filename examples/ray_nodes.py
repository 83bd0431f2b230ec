"""Run one job on a Ray cluster, from a script or a notebook: one `mpwatch.run` on each node of the cluster.

Install it with `pip install "mpwatch[ray]"`. `python examples/ray_nodes.py` starts a cluster of two nodes on this machine.
On a cluster of your own, replace `start_local_cluster()` by `ray.init(address="auto")`.
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
CPUS = 2  # of each node: one for each rank


@ray.remote(num_cpus=CPUS, max_retries=0)  # mpwatch restarts the ranks, so Ray must not
def run_node(train: Callable[..., Any], options: dict[str, Any]) -> dict[int, Any]:
    """Run the ranks of one node, as children of this Ray worker. For GPUs: num_gpus above, nprocs="gpu" here."""
    rendezvous = mpwatch.Rendezvous(**options, local_addr=ray.util.get_node_ip_address())
    result = mpwatch.run(train, nprocs=CPUS, backend="gloo", max_restarts=1, rendezvous=rendezvous)
    return result.return_values


def run_on_nodes(train: Callable[..., Any], nnodes: int) -> list[Any]:
    """Return the values of all ranks, in order of rank. Raise the error of `mpwatch.run`, wrapped by Ray."""
    group = placement_group([{"CPU": CPUS}] * nnodes, strategy="STRICT_SPREAD")  # each bundle on another node
    try:
        ray.get(group.ready())
        strategies = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n) for n in range(nnodes)]
        first_address = ray.get(get_address.options(scheduling_strategy=strategies[0]).remote())
        options = {
            "endpoint": f"{first_address}:{PORT}",
            "run_id": f"ray-{secrets.token_hex(4)}",
            "nnodes": nnodes,
            "secret": secrets.token_hex(16),
        }
        calls = [
            run_node.options(scheduling_strategy=strategies[n]).remote(train, {**options, "is_host": n == 0})
            for n in range(nnodes)
        ]
        values = {rank: value for values_of_node in ray.get(calls) for rank, value in values_of_node.items()}
        return [values[rank] for rank in sorted(values)]
    finally:
        remove_placement_group(group)


@ray.remote(num_cpus=1)
def get_address() -> str:
    """Return the address of the node that runs this function."""
    return str(ray.util.get_node_ip_address())


def start_local_cluster() -> Any:
    """Start a Ray cluster of two nodes on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS})
    cluster.add_node(num_cpus=CPUS)
    ray.init(address=cluster.address)
    return cluster


def train() -> str:
    """Add up the numbers of all ranks."""
    me = mpwatch.current_worker()
    total = torch.tensor(float(me.rank))
    dist.all_reduce(total)
    return f"rank {me.rank} of {me.world_size}, on node {me.group_rank}: the sum of all ranks is {total:g}"


if __name__ == "__main__":
    cluster = start_local_cluster()
    try:
        print(*run_on_nodes(train, 2), sep="\n")
    finally:
        ray.shutdown()
        cluster.shutdown()
