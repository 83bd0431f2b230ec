"""Builds the environment of each rank, and reserves MASTER_PORT. Runs in the watcher.

A rank has the environment of the calling program; then come the variables of torchrun, the user's `env`, the variable of its
own GPU (unless `env` has chosen one), and defaults for what is not set. docs/reference/environment.md lists them.
"""

import os
import socket
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from mpwatch.errors import LaunchError
from mpwatch.options.spec import GroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.cgroups import read_cpu_quota
from mpwatch.os_support.hardware import count_usable_cpus, get_allowed_cpus
from mpwatch.watcher.processes.binding import Binding, bind_rank, read_cores
from mpwatch.watcher.processes.devices import (
    DEVICE_VARIABLES,
    find_gpu_nodes,
    find_torch_accelerators,
    find_visible_devices,
    is_cpu_only,
    read_torch_builds,
    select_own_device,
)
from mpwatch.wire.resource_errors import with_remedy

MASTER_ADDR = "127.0.0.1"
# torch starts so many processes to compile at most (`decide_compile_threads` in torch/_inductor/config.py). Without
# TORCHINDUCTOR_COMPILE_THREADS it starts one for each CPU in the affinity of the rank, so all ranks together start too many.
MAX_COMPILE_THREADS = 32
FLIGHT_RECORDER_SIZE = "128"  # collectives that torch keeps; torch 2.13 keeps 2,000 by default, older ones none


class RankSetup(NamedTuple):
    worker: Worker
    env: dict[str, str]
    """The whole environment of the rank."""
    cpus: frozenset[int] | None = None
    """The CPUs on which the rank may run. None means the CPUs on which the watcher may run."""


def reserve_port() -> socket.socket:
    """Return a socket that reserves its port for the ranks while it is open. Raises LaunchError.

    It does not listen. The store of torch can listen on the same port, because both sockets have SO_REUSEADDR, and the
    kernel gives the port to no program that binds a socket to port 0.
    """
    try:
        reserved = socket.socket()
    except OSError as error:
        raise LaunchError(with_remedy("no socket could be opened to reserve MASTER_PORT", error)) from error
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
    except BaseException as error:  # a KeyboardInterrupt too: no signal is deferred yet
        reserved.close()
        if isinstance(error, OSError):
            raise LaunchError(with_remedy("no port could be reserved for MASTER_PORT", error)) from error
        raise
    return reserved


def copy_environment() -> dict[str, str]:
    """Return a copy of os.environ, which other threads may change meanwhile."""
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


def build_workers(spec: GroupSpec, ranks: Iterable[int], port: int, *, run_id: str, restart_count: int) -> list[Worker]:
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


def build_rank_setups(spec: GroupSpec, workers: Iterable[Worker], root: str = "/") -> list[RankSetup]:
    """Calls the user's functions in `env` and `placement`, and raises what they raise.

    MASTER_ADDR and MASTER_PORT from the user's `env` replace those of the Workers.
    """
    cpus, accelerators = spec.cpus_and_gpus.cpus, find_torch_accelerators()
    needs_devices = spec.cpus_and_gpus.gpus is not None or cpus == "numa"
    builds = read_torch_builds() if needs_devices else set()
    cores = [] if cpus is None else read_cores(get_allowed_cpus(), root)
    setups = []
    for worker in workers:
        extra = spec.extra_env_of(worker)
        address, port = extra.get("MASTER_ADDR", worker.master_addr), int(extra.get("MASTER_PORT", worker.master_port))
        known = replace(worker, master_addr=address, master_port=port)
        env = copy_environment() | _make_rank_variables(known, spec.policy.max_restarts) | extra
        gpu_nodes: list[int | None] = []
        if needs_devices:
            devices = find_visible_devices(env, builds, root)
            gpu_nodes = find_gpu_nodes(devices, worker.local_world_size)
            # The user's `env` may choose the one device of each rank, such as the same one for all.
            is_chosen = len(devices.entries) <= 1 and not DEVICE_VARIABLES.isdisjoint(extra)
            if spec.cpus_and_gpus.gpus == "own" and not is_chosen:
                env |= select_own_device(devices, known, env)
        binding = None if cpus is None else bind_rank(cpus, known, cores, gpu_nodes)
        _add_defaults(env, known, binding, accelerators)
        env.pop("PYTHONINSPECT", None)  # with it, each rank would print its SystemExit and end with code 1
        setups.append(RankSetup(known, env, None if binding is None else binding.cpus))
    return setups


def _make_rank_variables(worker: Worker, max_restarts: int) -> dict[str, str]:
    return {
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


def _add_defaults(env: dict[str, str], worker: Worker, binding: Binding | None, accelerators: set[str]) -> None:
    threads, processes = _count_threads(worker.local_world_size, binding)
    env.setdefault("OMP_NUM_THREADS", str(threads))
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(MAX_COMPILE_THREADS, processes)))
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in env:  # the older name, which warns
        env.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDER_SIZE)
    if worker.world_size > 1 and is_cpu_only(accelerators, env):
        # Without it, accelerate and transformers treat a rank without a GPU as the only process.
        env.setdefault("ACCELERATE_USE_CPU", "true")


def _count_threads(local_ranks: int, binding: Binding | None) -> tuple[int, int]:
    """Return how many OpenMP threads a rank should use, and how many processes torch.compile should start for it.

    They are the rank's shares of the CPUs it is bound to, but no more than its share of the cgroup's quota.
    """
    share = max(1, count_usable_cpus() // local_ranks)
    if binding is None:
        return share, share
    quota = read_cpu_quota()
    limit = binding.cpu_share if quota is None else max(1, quota // local_ranks)
    return min(binding.core_share, limit), min(binding.cpu_share, limit)
