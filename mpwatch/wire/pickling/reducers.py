"""Reducers that multiprocessing and torch have registered for sending objects to spawned processes. Used in the caller.

A reducer turns an object, such as a socket or a tensor, into values that can be pickled. torch is never imported here.
"""

from operator import attrgetter
from typing import Any

from mpwatch.os_support.cpython_private import get_spawn_reducers
from mpwatch.wire.pickling.per_rank import PerRank, refuse_per_rank
from mpwatch.wire.pickling.pickler import Reducers


def make_call_reducers() -> tuple[Reducers, Reducers]:
    """Return the reducers that have priority over cloudpickle's, and then those over which cloudpickle's have priority."""
    registered = list(get_spawn_reducers().items())  # one call of C code, since another thread may be importing torch
    of_torch = {cls: reducer for cls, reducer in registered if _is_of_torch(cls)}
    others = {cls: reducer for cls, reducer in registered if not _is_of_torch(cls)}
    return {PerRank: refuse_per_rank, **(_make_torch_reducers(of_torch) if of_torch else {})}, others


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def _make_torch_reducers(registered: Reducers) -> Reducers:
    """Share only what is shared: torch's own reducers would move every CPU tensor of the caller into shared memory."""
    import torch

    from mpwatch.wire.pickling.torch_storages import reducers, share_or_copy

    copying = reducers()
    sharing = {cls: share_or_copy(reducer, copying.get(cls, _reduce_plain)) for cls, reducer in registered.items()}
    add = torch.ops.aten.add
    return {type(add): _reduce_op, type(add.Tensor): _reduce_op, **sharing}


def _reduce_op(op: Any) -> Any:
    import torch

    return attrgetter(str(op)), (torch.ops,)


def _reduce_plain(obj: Any) -> Any:
    return obj.__reduce_ex__(5)
