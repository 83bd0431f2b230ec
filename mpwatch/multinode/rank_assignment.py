"""Build the Worker of each rank of a node from the numbers that the leader has assigned."""

from typing import Any

from mpwatch.options.spec import WorkerSpec
from mpwatch.options.worker_info import Worker


def build_assigned_workers(
    spec: WorkerSpec[Any],
    first_rank: int,
    *,
    attempt: int,
    job: str,
    group_rank: int,
    group_world_size: int,
    world_size: int,
    role_rank: int,
    role_world_size: int,
    master_addr: str,
    master_port: int,
) -> tuple[Worker, ...]:
    """Build the Worker of each rank of a node. `first_rank` is the global rank of the node's first rank.

    All arguments after `first_rank` are also fields of the event RendezvousCompleted, with the same meanings.
    """
    assert isinstance(spec.nprocs, int)
    return tuple(
        Worker(
            rank=first_rank + local_rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=spec.nprocs,
            group_rank=group_rank,
            group_world_size=group_world_size,
            role=spec.role,
            role_rank=role_rank + local_rank,
            role_world_size=role_world_size,
            restart_count=attempt,
            run_id=job,
            master_addr=master_addr,
            master_port=master_port,
        )
        for local_rank in range(spec.nprocs)
    )
