"""What a rank finds in its environment, and the port that is reserved for its rendezvous."""

import os
import socket
import uuid
from typing import Any

from ..errors import LaunchError
from ..platform import usable_cpus
from ..spec import Worker, WorkerSpec

__all__ = ["environment_of", "reserve_port", "workers_of"]

MASTER_ADDR = "127.0.0.1"


def reserve_port() -> socket.socket:
    """A socket that keeps its port for the ranks for as long as it is open.

    It is bound but does not listen: with SO_REUSEADDR on both, a store of torch's can then listen on the same port,
    while the kernel gives it to nobody who asks for any port. Raises LaunchError.
    """
    try:
        keeper = socket.socket()
    except OSError as error:
        raise LaunchError(f"no socket for MASTER_PORT could be had: {error}") from error
    try:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("", 0))
    except OSError as error:
        keeper.close()
        raise LaunchError(f"no port for MASTER_PORT could be reserved: {error}") from error
    return keeper


def workers_of(spec: WorkerSpec[Any], nprocs: int, port: int) -> tuple[Worker, ...]:
    """The ranks of a run on this machine alone."""
    run_id = uuid.uuid4().hex
    return tuple(
        Worker(
            rank=rank,
            local_rank=rank,
            world_size=nprocs,
            local_world_size=nprocs,
            role=spec.role,
            role_rank=rank,
            role_world_size=nprocs,
            run_id=run_id,
            master_addr=MASTER_ADDR,
            master_port=port,
        )
        for rank in range(nprocs)
    )


def environment_of(worker: Worker, extra: dict[str, str]) -> dict[str, str]:
    """The whole environment of a rank: the caller's, who the rank is, and what the `env` option adds."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // worker.local_world_size)))
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env |= {
        "RANK": str(worker.rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(worker.local_world_size),
        "GROUP_RANK": str(worker.group_rank),
        "NODE_RANK": str(worker.group_rank),  # what Composer, Ray and accelerate read
        "GROUP_WORLD_SIZE": str(worker.group_world_size),
        "ROLE_NAME": worker.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": worker.master_addr,
        "MASTER_PORT": str(worker.master_port),
        "TORCHELASTIC_RUN_ID": worker.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(worker.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store, also inside a job of torchrun
    }
    return env | extra
