"""Torch's tensors in a bundle: the memory that they are views of goes as a buffer, once, whoever looks into it.

A tensor pickles as a view of its storage, and makes an object for that each time it is asked. Here all objects for the same
memory lead to one `_Memory`, which pickle writes once: tied weights stay tied, and a slice stays a slice of its whole.

Imports torch, so it is imported only where torch is loaded, or where a tensor has come.
"""

import ctypes
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import torch
import torch.storage

from mpwatch.torch_private import identity_of, rebuild_from_type_v2, rebuild_tensor_v3, typed_storage, untyped_storage_of

# its stubs do not say of what types their arguments are
TypedStorage: Any = torch.storage.TypedStorage
UntypedStorage: Any = torch.storage.UntypedStorage

Reducer = Callable[[Any], Any]


def reducers() -> dict[type, Reducer]:
    """How one pickler is to pickle tensors and storages; those of other devices than the CPU go as torch does it."""
    met: dict[int, _StorageMemory] = {}

    def reduce_typed(storage: Any) -> Any:
        memory = untyped_storage_of(storage)
        return storage.__reduce_ex__(5) if memory.device.type != "cpu" else (_typed, (met_as(memory), storage.dtype))

    def reduce_untyped(storage: Any) -> Any:
        return storage.__reduce_ex__(5) if storage.device.type != "cpu" else (_itself, (met_as(storage),))

    def met_as(storage: Any) -> _StorageMemory:
        return met.setdefault(identity_of(storage), _StorageMemory(storage))

    return {torch.Tensor: _reduce_tensor, TypedStorage: reduce_typed, UntypedStorage: reduce_untyped}


def share_or_copy(share: Reducer, copy: Reducer) -> Reducer:
    """Return a reducer that shares an object whose memory is shared already, and copies any other object."""

    def reduce(obj: Any) -> Any:
        return share(obj) if _is_shared(obj) else copy(obj)

    return reduce


def _is_shared(obj: Any) -> bool:
    memory = untyped_storage_of(obj)
    try:
        return bool(memory.is_shared() or memory.is_cuda)
    except (AttributeError, NotImplementedError):  # events; sparse tensors, which are made of several
        return True


def _reduce_tensor(tensor: Any) -> Any:
    make, args, *more = tensor.__reduce_ex__(5)
    return make, _loadable(make, args), *more


def _loadable(make: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What torch makes it of, but that it cannot load what it makes of one of its newer types (float8, uint16)."""
    if make is rebuild_tensor_v3:
        storage, *rest = args
        args = (_typed(storage, torch.uint8), *rest)  # where it looks for a typed one, of whatever type
    elif make is rebuild_from_type_v2:  # of one with attributes of its own
        make_it, kind, its_args, *state = args
        args = (make_it, kind, _loadable(make_it, its_args), *state)
    return args


class _StorageMemory:
    """One storage's, kept as long as the pickler knows of it. Unpickled, it is the UntypedStorage."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __reduce__(self) -> Any:
        size = self._storage.nbytes()
        if size == 0:  # it has no address
            return _storage, (b"",)
        block: Any = (ctypes.c_ubyte * size).from_address(self._storage.data_ptr())
        block.owner = self._storage  # the buffer is written after the pickle
        return _storage, (PickleBuffer(block),)


def _storage(buffer: bytes | bytearray | memoryview) -> Any:
    if not buffer:
        return UntypedStorage(0)
    found = torch.frombuffer(buffer, dtype=torch.uint8)
    # what came within the pickle is copied, so that it can be resized as it could where it comes from
    return (found if isinstance(buffer, memoryview) else found.clone()).untyped_storage()


def _typed(storage: Any, dtype: Any) -> Any:
    return typed_storage(storage, dtype)


def _itself(storage: Any) -> Any:
    return storage
