"""The process group that `backend` asks for: made before the function, destroyed after it. Runs in a rank."""

from typing import Any

from .context import current_worker

__all__ = ["destroy", "init"]

# The store that the group was made over. Rank 0 serves it, and the others may need it for as long as they run, so it
# must not go with the group but with the rank, which the watcher keeps until all have answered.
_store: Any = None


def init(backend: str) -> None:
    """Join the default process group. Raises whatever torch raises."""
    global _store
    import torch

    dist: Any = torch.distributed  # its stubs do not have TCPStore
    worker = current_worker()
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available() and "nccl" in backend:
        torch.cuda.set_device(worker.local_rank % torch.cuda.device_count())
    _store = dist.TCPStore(
        worker.master_addr,
        worker.master_port,
        worker.world_size,
        is_master=worker.rank == 0,
    )
    dist.init_process_group(backend, store=_store, rank=worker.rank, world_size=worker.world_size)


def destroy() -> None:
    """Leave the default process group, unless the function did so itself. Raises whatever torch raises."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
