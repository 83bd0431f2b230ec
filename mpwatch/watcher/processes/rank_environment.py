"""Builds the environment of each rank, and reserves MASTER_PORT. Runs in the watcher.

A rank's environment has four parts. A later part replaces variables of an earlier one.

1. The environment of the host program.
2. Defaults, only where the host program does not set them: OMP_NUM_THREADS, TORCH_NCCL_ASYNC_ERROR_HANDLING.
3. The variables of torchrun: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_NAME,
   ROLE_RANK, ROLE_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT,
   TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_USE_AGENT_STORE. Also NODE_RANK, with the value of GROUP_RANK.
4. The user's `env` option.

TORCH_FR_BUFFER_SIZE=128 is added, unless the user sets it or TORCH_NCCL_TRACE_BUFFER_SIZE. torch's flight recorder then
keeps the last collectives (worker/collectives.py). If there are several ranks and torch can find no accelerator,
ACCELERATE_USE_CPU=true is added, unless it is set.
"""

import os
import socket
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from mpwatch.errors import LaunchError
from mpwatch.options.spec import GroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.hardware import count_usable_cpus
from mpwatch.watcher.processes.accelerators import find_torch_accelerators, is_cpu_only
from mpwatch.wire.resource_errors import with_remedy

MASTER_ADDR = "127.0.0.1"
FLIGHT_RECORDER_SIZE = "128"  # collectives that torch keeps; torch 2.13 keeps 2,000 by default, older ones none


class RankSetup(NamedTuple):
    """A rank that can be started."""

    worker: Worker
    env: dict[str, str]
    """The whole environment of the rank."""


def reserve_port() -> socket.socket:
    """Return a socket that reserves its port for the ranks while it is open. Raises LaunchError.

    The socket is bound but does not listen, and has SO_REUSEADDR. So torch's store, which sets SO_REUSEADDR too, can listen
    on the same port. The kernel does not give the port to a program that asks for any free port.
    """
    try:
        reserved = socket.socket()
    except OSError as error:
        raise LaunchError(with_remedy("no socket could be opened to reserve MASTER_PORT", error)) from error
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
    except OSError as error:
        reserved.close()
        raise LaunchError(with_remedy("no port could be reserved for MASTER_PORT", error)) from error
    return reserved


def build_workers(spec: GroupSpec, ranks: Iterable[int], port: int, *, run_id: str, restart_count: int) -> list[Worker]:
    """Return the Workers of these ranks, in a run on a single node."""
    nprocs = spec.nprocs
    assert isinstance(nprocs, int)  # GroupSpec has resolved what the user passed
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


def build_rank_setups(spec: GroupSpec, workers: Iterable[Worker]) -> list[RankSetup]:
    """Return each Worker with the whole environment of its rank.

    The user's `env` may set MASTER_ADDR and MASTER_PORT. The returned Workers have these values, too. Raises what the
    user's `env` function raises, and TypeError or ValueError if it returns a wrong value.
    """
    accelerators = find_torch_accelerators()
    setups = []
    for worker in workers:
        extra = spec.extra_env_of(worker)
        address, port = extra.get("MASTER_ADDR", worker.master_addr), int(extra.get("MASTER_PORT", worker.master_port))
        known = replace(worker, master_addr=address, master_port=port)
        env = _build_rank_environment(known, extra, spec.policy.max_restarts, accelerators)
        setups.append(RankSetup(known, env))
    return setups


def _build_rank_environment(
    worker: Worker, extra: dict[str, str], max_restarts: int, accelerators: set[str]
) -> dict[str, str]:
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(max(1, count_usable_cpus() // worker.local_world_size)))
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env |= {
        "RANK": str(worker.rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(worker.local_world_size),
        "GROUP_RANK": str(worker.group_rank),
        "NODE_RANK": str(worker.group_rank),  # Composer, Ray and accelerate read this name
        "GROUP_WORLD_SIZE": str(worker.group_world_size),
        "ROLE_NAME": worker.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": worker.master_addr,
        "MASTER_PORT": str(worker.master_port),
        "TORCHELASTIC_RUN_ID": worker.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(worker.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store, even inside a job of torchrun
    }
    env |= extra
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in env:  # the older name, which warns
        env.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDER_SIZE)
    if worker.world_size > 1 and is_cpu_only(accelerators, env):
        # Without it, accelerate and transformers treat a rank without a GPU as the only process.
        env.setdefault("ACCELERATE_USE_CPU", "true")
    return env
