"""The reducers that multiprocessing and torch have registered for spawned processes: how to pickle sockets, tensors and
others.

Runs in the watcher. Imports nothing that is not loaded already.
"""

from collections.abc import Callable
from typing import Any

from mpwatch.os_support.cpython_private import get_spawn_reducers

Reducer = Callable[[Any], Any]
Reducers = dict[type, Reducer]


def multiprocessing_reducers() -> Reducers:
    """Return the reducers for connections, sockets and others that are not torch's."""
    return {cls: reducer for cls, reducer in _copy_registered() if not _is_of_torch(cls)}


def torch_reducers() -> Reducers:
    """Return the reducers for torch's classes. They share only tensors that are in shared memory already.

    torch's own reducers would move every CPU tensor of the caller into shared memory.
    """
    registered = {cls: reducer for cls, reducer in _copy_registered() if _is_of_torch(cls)}
    if not registered:
        return {}
    from mpwatch.wire.pickling.torch_storages import reducers, share_or_copy

    copying = reducers()
    return {cls: share_or_copy(reducer, copying.get(cls, _reduce_plain)) for cls, reducer in registered.items()}


def _copy_registered() -> list[tuple[type, Reducer]]:
    return list(get_spawn_reducers().items())  # one call of C: another thread of the caller may be importing torch


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def _reduce_plain(obj: Any) -> Any:
    return obj.__reduce_ex__(5)
