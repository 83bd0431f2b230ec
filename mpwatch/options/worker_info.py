"""`Worker` is the identity of a rank. Environment variables such as RANK also contain the identity of the rank.

The watcher makes a Worker for each rank. A rank makes its own Worker when `current_worker()` is called for the first time.
"""

from dataclasses import dataclass, field
from typing import Any

# The variables that hold the identity of a rank. A caller may not set them. MASTER_ADDR and MASTER_PORT are not among them,
# since a caller may know a better address.
RANK_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "NODE_RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_USE_AGENT_STORE",
    }
)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The identity of a rank. In a rank, `current_worker()` returns the Worker of this rank.

    `RunResult.workers` has the Workers of all ranks.

    Attributes:
        rank: global rank, from 0 to world_size - 1.
        local_rank: rank on this machine, from 0. It is usually the index of the GPU to use. With Placement(gpus="own"), the
            index of the GPU is 0.
        world_size: number of ranks, on all machines.
        local_world_size: number of ranks on this machine.
        group_rank: index of this machine among the machines of the run, from 0.
        group_world_size: number of machines.
        role: the option `role`.
        role_rank: rank among the ranks of the same role.
        role_world_size: number of ranks of the same role.
        restart_count: how many times this rank was restarted.
        run_id: identifier of the run: 32 hexadecimal digits, or `Rendezvous.run_id`.
        master_addr: address of the machine of rank 0, where rank 0 can serve a store of torch.distributed.
        master_port: TCP port that is reserved for that store. The system gives this port to no other program during the run.
        state: a dict for the function's own use. It exists as long as the process of the rank.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int = 0
    group_world_size: int = 1
    role: str = "default"
    role_rank: int
    role_world_size: int
    restart_count: int = 0
    run_id: str
    master_addr: str
    master_port: int
    state: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
