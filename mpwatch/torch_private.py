"""The private names of torch that mpwatch uses. Read this file first when a new version of torch breaks a test.

A comment or a docstring describes each private name. The description says which versions of torch have this private name,
and what breaks in mpwatch if torch removes the private name. In the comments, "If it goes" means "If torch removes this
private name". All facts about torch in this file come from the source code of torch 2.4, 2.6, 2.9 and 2.13.

This module imports torch. Import this module only where torch is needed anyway: in `wire/pickling/torch_storages.py` and in
`worker/collectives.py`.
"""

import os
import pickle
from importlib import import_module
from types import CodeType
from typing import Any

import torch
import torch._tensor
import torch._utils
import torch.storage

# Tensors: wire/pickling/torch_storages.py.

# `Tensor.__reduce_ex__` returns this function for the newer types (float8, uint16). If it goes, no tensor can be pickled.
# All four versions have it.
rebuild_tensor_v3: Any = torch._utils._rebuild_tensor_v3

# `Tensor.__reduce_ex__` returns this function for a tensor that has attributes of its own. If it goes, no tensor can be
# pickled. All four versions have it.
rebuild_from_type_v2: Any = torch._tensor._rebuild_from_type_v2


def get_untyped_storage(storage: Any) -> Any:
    """Return the untyped storage of a TypedStorage. If `storage` is not a TypedStorage, return `storage` unchanged.

    This function reads `_untyped_storage`, because the public attributes of a TypedStorage warn that this class is
    deprecated. If `_untyped_storage` is missing, no TypedStorage can be pickled. torch 2.4, 2.6, 2.9 and 2.13 have
    `_untyped_storage`.
    """
    return getattr(storage, "_untyped_storage", storage)


def get_storage_id(storage: Any) -> int:
    """Return a number that identifies a storage of torch.

    If two Python objects refer to the same storage, this function returns the same number for both objects. The number is
    `_cdata`, the address of the C++ object. If `_cdata` is missing, no tensor can be pickled. torch 2.4, 2.6, 2.9 and 2.13
    have `_cdata`.
    """
    return int(storage._cdata)


def make_typed_storage(storage: Any, dtype: Any) -> Any:
    """Build a TypedStorage that uses the memory of an untyped storage.

    With the argument `_internal`, torch does not warn that TypedStorage is deprecated. If TypedStorage has no parameter
    `_internal`, no tensor can be unpickled. TypedStorage has the parameter `_internal` in torch 2.4, 2.6, 2.9 and 2.13.
    """
    make: Any = torch.storage.TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


# The flight recorder: worker/collectives.py.

FLIGHT_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")


def read_flight_recorder() -> list[dict[str, Any]]:
    """Return the collectives of this process that torch's flight recorder has recorded.

    For each backend, the collectives are in the order in which this process called them. The returned records have no
    stacks. To make stacks, torch imports torch._inductor, which takes a second or more.

    `_dump_fr_trace` returns the collectives of gloo, and `_dump_nccl_trace` returns the collectives of NCCL. Without
    `_dump_fr_trace` and `_dump_nccl_trace`, mpwatch has only the stacks of the ranks to find the cause of a hang. torch 2.13
    has both `_dump_fr_trace` and `_dump_nccl_trace` if it was built with NCCL. torch 2.4 to 2.9 have only
    `_dump_nccl_trace`, and record no collectives of gloo.
    """
    bindings: Any = import_module("torch._C._distributed_c10d")
    entries: list[dict[str, Any]] = []
    for name in FLIGHT_RECORDERS:
        if dump := getattr(bindings, name, None):
            entries += pickle.loads(dump(True, False, False)).get("entries", ())
    return entries


def has_flight_recorder() -> bool:
    """Return whether the installed torch can record collectives."""
    bindings = import_module("torch._C._distributed_c10d")
    return any(hasattr(bindings, name) for name in FLIGHT_RECORDERS)


def get_group_names() -> dict[Any, str]:
    """Return the torch name of each process group in this process. The keys of the dict are the ProcessGroup objects.

    This function reads `_world.pg_names`, because torch has no public list of process groups. If `_world` or `pg_names` is
    missing, mpwatch does not know which ranks belong to a collective, and cannot find out which rank is missing. torch 2.4,
    2.6, 2.9 and 2.13 have `_world` and `pg_names`.
    """
    return dict(import_module("torch.distributed.distributed_c10d")._world.pg_names)


def get_process_groups() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return a dict of the process groups of this process. The keys of the dict are torch's names of the groups.

    Each value of the dict has two parts: the description of the group, and a tuple of the group's global ranks. In the tuple
    `(4, 2)`, global rank 4 is rank 0 of the group. If `pg_group_ranks` is missing, mpwatch does not know which ranks belong
    to a collective. torch 2.4, 2.6, 2.9 and 2.13 have `pg_group_ranks`.
    """
    ranks = import_module("torch.distributed.distributed_c10d")._world.pg_group_ranks
    groups = {}
    for group, name in get_group_names().items():
        numbers = ranks.get(group, {})
        groups[name] = getattr(group, "group_desc", ""), tuple(sorted(numbers, key=numbers.__getitem__))
    return groups


def get_group_name(group: Any) -> str:
    """Return torch's name of a process group. If `group` is None, return the name of the default group.

    The returned name is empty if torch does not know the group. If `default_pg` is missing, `get_group_name` and
    `describe_world` raise AttributeError. torch 2.4, 2.6, 2.9 and 2.13 have `default_pg`.
    """
    module = import_module("torch.distributed.distributed_c10d")
    return get_group_names().get(module._world.default_pg if group is None else group, "")


def describe_world() -> tuple[str, int]:
    """Return a text that names the store of the default process group, and the rank of this process in the group.

    In all processes of the default process group, `describe_world` returns the same text. If two default process groups use
    the same store, `describe_world` returns the same text for both groups.

    This function uses `_world.pg_map` and the attribute `underlying_store`, because torch has no public way to find the
    store of a group. If `pg_map` or `underlying_store` is missing, mpwatch can confuse the ranks of two default process
    groups in one run. torch 2.4, 2.6, 2.9 and 2.13 have `pg_map` and `underlying_store`.
    """
    module = import_module("torch.distributed.distributed_c10d")
    group = module._world.default_pg
    store = module._world.pg_map.get(group, ("", None))[1]
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return str(getattr(store, "port", getattr(store, "path", ""))), group.rank()


def is_of_torch(code: CodeType) -> bool:
    """Return whether `code` is a part of torch that can wait in a collective.

    This function returns False for code of torch.utils, such as the code in which a DataLoader waits for data.
    """
    folder = os.path.dirname(torch.__file__) + os.sep
    return code.co_filename.startswith(folder) and not code.co_filename.startswith(os.path.join(folder, "utils", ""))
