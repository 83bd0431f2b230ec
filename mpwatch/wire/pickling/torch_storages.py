"""Pickle torch's tensors, and the memory of each storage once, even if many tensors are views of it.

torch makes a new Python object for the storage each time it pickles a tensor. Here all objects of one storage share one
`_StorageMemory`. So tied weights stay tied, a slice stays a view of its tensor, and the slices that different ranks get of
one tensor are written once.

This module imports torch, so other modules import this module only if torch is already loaded.
"""

import ctypes
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.storage

from mpwatch.torch_private import (
    get_storage_id,
    get_untyped_storage,
    make_typed_storage,
    rebuild_from_type_v2,
    rebuild_tensor_v3,
)

# torch's stubs have no types for the arguments of these classes
TypedStorage: Any = torch.storage.TypedStorage
UntypedStorage: Any = torch.storage.UntypedStorage

Reducer = Callable[[Any], Any]


def _reduce_storage(storage: Any) -> Any:
    untyped = get_untyped_storage(storage)
    if untyped.device.type != "cpu":
        return storage.__reduce_ex__(5)
    memory = _get_memory(untyped)
    return (_rebuild_untyped, (memory,)) if untyped is storage else (make_typed_storage, (memory, storage.dtype))


def _get_memory(storage: Any) -> "_StorageMemory":
    number = get_storage_id(storage)
    memory = _memories.get(number)
    if memory is None:
        memory = _memories[number] = _StorageMemory(storage)
    return memory


def share_or_copy(share: Reducer, copy: Reducer) -> Reducer:
    """Return a reducer that calls `share` for an object in shared memory or on a GPU, and `copy` for any other object."""

    def reduce(obj: Any) -> Any:
        return share(obj) if _is_shared(obj) else copy(obj)

    return reduce


def _is_shared(obj: Any) -> bool:
    storage = get_untyped_storage(obj)
    try:
        return bool(storage.is_shared() or storage.is_cuda)
    except (AttributeError, NotImplementedError):  # an event has no storage, and a sparse tensor has several
        return True


def _reduce_tensor(tensor: Any) -> Any:
    rebuild, args, *state = tensor.__reduce_ex__(5)
    return rebuild, _make_loadable(rebuild, args), *state


def _make_loadable(rebuild: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """For the newer dtypes, such as float8 and uint16, torch returns an untyped storage, which `rebuild` cannot use."""
    if rebuild is rebuild_tensor_v3:
        storage, *rest = args
        args = (make_typed_storage(storage, torch.uint8), *rest)  # torch needs a typed storage here, of any type
    elif rebuild is rebuild_from_type_v2:  # a tensor with attributes that the user has set
        inner_rebuild, cls, inner_args, *state = args
        args = (inner_rebuild, cls, _make_loadable(inner_rebuild, inner_args), *state)
    return args


class _StorageMemory:
    """The memory of one torch storage, which is loaded as an UntypedStorage. Keeps the storage alive."""

    def __init__(self, storage: Any) -> None:
        self._block: Any = b""
        if size := storage.nbytes():  # an empty storage has no address
            self._block = (ctypes.c_ubyte * size).from_address(storage.data_ptr())
            self._block.owner = storage  # keeps the memory alive, since the buffer is written after the pickle

    def __reduce__(self) -> Any:
        return _rebuild_storage, (PickleBuffer(self._block) if self._block else b"",)


def _rebuild_storage(buffer: bytes | bytearray | memoryview) -> Any:
    if not buffer:
        return UntypedStorage(0)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    # If the buffer is inside the pickle, copy it, so that the storage owns its memory and can be resized.
    return (tensor if isinstance(buffer, memoryview) else tensor.clone()).untyped_storage()


def _rebuild_untyped(storage: Any) -> Any:
    return storage


_memories: WeakValueDictionary[int, _StorageMemory] = WeakValueDictionary()  # those that a pickler has in its memo
REDUCERS: dict[type, Reducer] = {
    torch.Tensor: _reduce_tensor,
    TypedStorage: _reduce_storage,
    UntypedStorage: _reduce_storage,
}
