"""Who the ranks of a node are in an attempt: as the node of group rank 0 has placed them, each a `Worker`. Pure."""

from typing import Any

from mpwatch.options.spec import WorkerSpec
from mpwatch.options.worker_info import Worker


def workers_of(
    spec: WorkerSpec[Any],
    rank: int,
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
    """The ranks of a node, of which `rank` and `role_rank` are the first. See RendezvousCompleted for the others."""
    assert isinstance(spec.nprocs, int)
    return tuple(
        Worker(
            rank=rank + local_rank,
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
