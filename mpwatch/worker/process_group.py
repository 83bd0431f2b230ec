"""Create and destroy a rank's torch process group, if the option `backend` is set. This module runs in a rank."""

import socket
from datetime import timedelta
from typing import Any

from mpwatch.worker.context import current_worker

# The torch store that all process groups use. Rank 0 serves the store, and the other ranks may need it until they have
# answered. So each rank keeps the store until it exits, and not only as long as a group. The watcher lets no rank exit until
# all ranks have answered.
_store: Any = None
_version: int | None = None  # the version of the last group, even if the group's initialisation failed
_group_number = 0  # the number of the last group within its version; equal in all ranks, even if a group failed in some


def init(backend: str, version: int | None, timeout: float | None) -> None:
    """Join the default process group, unless the rank has one of this version, and wait until all ranks have joined it.

    With gloo, torch's `init_process_group` waits only until this rank is connected, and fails in other ranks if one leaves
    earlier. `timeout` is that of each collective, in seconds. Raises what torch raises.
    """
    global _version, _group_number
    import torch

    dist: Any = torch.distributed  # torch's stubs are incomplete
    if dist.is_initialized():
        if version is not None and version == _version:
            return
        dist.destroy_process_group()
    if backend == "nccl" and not torch.cuda.is_available():
        raise RuntimeError(
            'backend="nccl" needs a GPU, and torch sees none here; use "gloo", or "auto" for nccl where it can be'
        )
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    worker = current_worker()
    if torch.cuda.is_available() and "nccl" in backend:
        torch.cuda.set_device(worker.local_rank % torch.cuda.device_count())
    _version, _group_number = version, _group_number + 1 if version == _version else 0
    # The prefix differs from group to group. So this group's keys differ from the keys that other groups have left.
    store = dist.PrefixStore(f"mpwatch/{version}/{_group_number}", _get_store(dist))
    limit = None if timeout is None else timedelta(seconds=timeout)
    dist.init_process_group(backend, timeout=limit, store=store, rank=worker.rank, world_size=worker.world_size)
    if store.add("joined", 1) == worker.world_size:
        store.set("all have joined", "")
    store.wait(["all have joined"])


def is_kept() -> bool:
    return _version is not None


def destroy() -> None:
    """Destroy the default process group if it still exists. Raises whatever torch raises."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _get_store(dist: Any) -> Any:
    global _store
    import torch

    if _store is None:
        worker = current_worker()
        address, port, world_size, is_master = worker.master_addr, worker.master_port, worker.world_size, worker.rank == 0
        options: dict[str, Any] = {}
        if is_master and (address == "localhost" or address.startswith("127.")):
            # torch itself would listen on all interfaces, and anybody can read and write the keys of a store.
            fd = socket.create_server((address, port), backlog=world_size).detach()
            # Before torch 2.8, the server with libuv takes no descriptor.
            options = {"master_listen_fd": fd, "use_libuv": torch.__version__ >= "2.8"}
        _store = dist.TCPStore(address, port, world_size, is_master=is_master, **options)
    return _store
