"""The process group that `backend` asks for: made before the function, and destroyed after it or kept. Runs in a rank."""

from typing import Any

from mpwatch.worker.context import current_worker

# The store that the groups are made over. Rank 0 serves it, and the others may need it for as long as they run, so it
# must not go with a group but with the rank, which the watcher keeps until all have answered.
_store: Any = None
_epoch: int | None = None  # of the group that was made last, or tried
_made = 0  # how many there were before it in that epoch; the same in all ranks, whatever became of earlier ones


def init(backend: str, epoch: int | None) -> None:
    """Join the default process group, unless that of this epoch is still there. Raises whatever torch raises.

    Args:
        backend: of torch.distributed, or "auto": nccl with GPUs, else gloo.
        epoch: see `payload.Call`.
    """
    global _epoch, _made
    import torch

    dist: Any = torch.distributed  # its stubs do not have all
    if dist.is_initialized():
        if epoch is not None and epoch == _epoch:
            return
        dist.destroy_process_group()
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    worker = current_worker()
    if torch.cuda.is_available() and "nccl" in backend:
        torch.cuda.set_device(worker.local_rank % torch.cuda.device_count())
    _epoch, _made = epoch, _made + 1 if epoch == _epoch else 0
    # with names of its own: what another group has left there is none of this one's
    store = dist.PrefixStore(f"mpwatch/{epoch}/{_made}", _make_store(dist))
    dist.init_process_group(backend, store=store, rank=worker.rank, world_size=worker.world_size)


def destroy() -> None:
    """Leave the default process group, unless the function did so itself. Raises whatever torch raises."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _make_store(dist: Any) -> Any:
    global _store
    if _store is None:
        worker = current_worker()
        _store = dist.TCPStore(
            worker.master_addr,
            worker.master_port,
            worker.world_size,
            is_master=worker.rank == 0,
        )
    return _store
