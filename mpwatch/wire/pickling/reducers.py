"""Reducers that multiprocessing and torch have registered for sending objects to spawned processes.

A reducer is a function that reduces an object, such as a socket or a tensor, to values that can be pickled. This module runs
in the watcher. If torch is not loaded, this module does not import torch.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from mpwatch.os_support.cpython_private import get_spawn_reducers

Reducer = Callable[[Any], Any]
Reducers = dict[type, Reducer]


def multiprocessing_reducers() -> Reducers:
    """Return the reducers for connections, sockets and other objects whose classes do not belong to torch."""
    return {cls: reducer for cls, reducer in _copy_registered() if not _is_of_torch(cls)}


def torch_reducers() -> Reducers:
    """Return the reducers for torch's classes. The reducers share a CPU tensor only if it is already in shared memory.

    torch's own reducers would move every CPU tensor of the caller into shared memory.
    """
    registered = {cls: reducer for cls, reducer in _copy_registered() if _is_of_torch(cls)}
    if not registered:
        return {}
    import torch

    from mpwatch.wire.pickling.torch_storages import reducers, share_or_copy

    copying = reducers()
    sharing = {cls: share_or_copy(reducer, copying.get(cls, _reduce_plain)) for cls, reducer in registered.items()}
    add = torch.ops.aten.add
    return {type(add): _reduce_op, type(add.Tensor): _reduce_op, **sharing}


def _copy_registered() -> list[tuple[type, Reducer]]:
    return list(get_spawn_reducers().items())  # one call of C code, since another thread may be importing torch


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def _reduce_op(op: Any) -> Any:
    import torch

    return attrgetter(str(op)), (torch.ops,)


def _reduce_plain(obj: Any) -> Any:
    return obj.__reduce_ex__(5)
