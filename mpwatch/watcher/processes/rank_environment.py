"""What a rank finds in its environment, and the port that is reserved for its rendezvous."""

import os
import socket
from collections.abc import Iterable
from dataclasses import replace

from mpwatch.errors import LaunchError
from mpwatch.options.spec import GroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.hardware import usable_cpus
from mpwatch.watcher.processes.accelerators import accelerators_of_torch, is_cpu_only
from mpwatch.wire.resource_errors import with_remedy

MASTER_ADDR = "127.0.0.1"


def reserve_port() -> socket.socket:
    """A socket that keeps its port for the ranks for as long as it is open.

    It is bound but does not listen: with SO_REUSEADDR on both, a store of torch's can then listen on the same port,
    while the kernel gives it to nobody who asks for any port. Raises LaunchError.
    """
    try:
        keeper = socket.socket()
    except OSError as error:
        raise LaunchError(with_remedy("no socket for MASTER_PORT could be had", error)) from error
    try:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("", 0))
    except OSError as error:
        keeper.close()
        raise LaunchError(with_remedy("no port for MASTER_PORT could be reserved", error)) from error
    return keeper


def workers_here(spec: GroupSpec, ranks: Iterable[int], port: int, *, run_id: str, restart_count: int) -> list[Worker]:
    """These ranks of a run on this machine alone."""
    nprocs = spec.nprocs
    assert isinstance(nprocs, int)  # whatever the caller gave, see GroupSpec
    return [
        Worker(
            rank=rank,
            local_rank=rank,
            world_size=nprocs,
            local_world_size=nprocs,
            role=spec.role,
            role_rank=rank,
            role_world_size=nprocs,
            restart_count=restart_count,
            run_id=run_id,
            master_addr=MASTER_ADDR,
            master_port=port,
        )
        for rank in ranks
    ]


def environments_of(spec: GroupSpec, workers: Iterable[Worker]) -> list[tuple[Worker, dict[str, str]]]:
    """These ranks, each with its whole environment.

    Raises TypeError or ValueError for what the caller's `env` function returns, and whatever it raises.
    """
    accelerators = accelerators_of_torch()
    setups = []
    for worker in workers:
        extra = spec.environment_of(worker)
        # a caller may know a better address: what the rank is told and what it finds are the same
        address, port = extra.get("MASTER_ADDR", worker.master_addr), int(extra.get("MASTER_PORT", worker.master_port))
        known = replace(worker, master_addr=address, master_port=port)
        setups.append((known, _environment_of(known, extra, spec.policy.max_restarts, accelerators)))
    return setups


def _environment_of(worker: Worker, extra: dict[str, str], max_restarts: int, accelerators: set[str]) -> dict[str, str]:
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
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store, also inside a job of torchrun
    }
    env |= extra
    if worker.world_size > 1 and is_cpu_only(accelerators, env):
        # without it, in ranks that have no GPU, accelerate takes each for the only process, and so does transformers
        env.setdefault("ACCELERATE_USE_CPU", "true")
    return env
