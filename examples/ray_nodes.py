"""Run one job on the nodes of a Ray cluster, from one call in a script or a notebook.

Install it with `pip install "mpwatch[ray]"`. `python examples/ray_nodes.py` starts a cluster of two nodes on this machine.
On a cluster of your own, replace `start_local_cluster()` by `ray.init(address="auto")`.
"""

from typing import Any

import ray
import torch
import torch.distributed as dist

import mpwatch
from mpwatch.integrations.ray import run

CPUS = 2  # of each node: one for each rank


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
        print(*run(train, nprocs=CPUS, nodes=2, backend="gloo", max_restarts=1), sep="\n")
    finally:
        ray.shutdown()
        cluster.shutdown()
