"""How things go that pickle alone cannot send, or not well: what multiprocessing and torch have registered for spawn.

Runs in the watcher; imports nothing that is not loaded.
"""

from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

Reducer = Callable[[Any], Any]
Reducers = dict[type, Reducer]

# By exact type; typeshed does not know it.
REGISTERED: Reducers = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]


def multiprocessing_reducers() -> Reducers:
    """For connections, sockets and the like: what multiprocessing registered for spawn, torch's part left out."""
    return {kind: how for kind, how in _registered() if not _is_torch(kind)}


def torch_reducers() -> Reducers:
    """Torch's own move every CPU tensor into shared memory, the caller's own; here only those that are there go so."""
    theirs = {kind: how for kind, how in _registered() if _is_torch(kind)}
    if not theirs:
        return {}
    from mpwatch.wire.pickling.torch_storages import reducers, share_or_copy

    ours = reducers()
    return {kind: share_or_copy(how, ours.get(kind, _plainly)) for kind, how in theirs.items()}


def _registered() -> list[tuple[type, Reducer]]:
    return list(REGISTERED.items())  # at once: another thread of the caller's may be importing torch


def _is_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _plainly(obj: Any) -> Any:
    return obj.__reduce_ex__(5)
