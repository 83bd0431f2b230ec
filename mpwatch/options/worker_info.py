"""Who a rank is: a `Worker`, and the variables that say the same. Both sides make one, the rank when it is asked for."""

from dataclasses import dataclass, field
from typing import Any

# What tells a rank who it is. MASTER_ADDR and MASTER_PORT are not here: a caller may know a better address.
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
    """Who a rank is. In a rank `current_worker()` gives its own; the result of a run has them all."""

    rank: int
    """Global rank, from 0 to world_size - 1."""
    local_rank: int
    """Rank on this machine, from 0; usually the index of the GPU to use."""
    world_size: int
    local_world_size: int
    group_rank: int = 0
    """Number of this machine among those of the run."""
    group_world_size: int = 1
    role: str = "default"
    role_rank: int
    role_world_size: int
    restart_count: int = 0
    run_id: str
    master_addr: str
    """Address that rank 0 can serve a rendezvous store on."""
    master_port: int
    """TCP port reserved for it: nobody else is given it while the run lasts."""
    state: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """For the function's own use; lives as long as the rank."""
