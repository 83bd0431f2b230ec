"""The private names of torch that mpwatch uses. Read this file first when a new version of torch breaks a test.

The comments say what breaks if torch removes a name. They come from the source code of torch 2.4, 2.6, 2.9 and 2.13.

Import this module only where torch is needed anyway: in `wire/pickling/torch_storages.py` and in `worker/collectives.py`.
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

# `Tensor.__reduce_ex__` returns these: for the newer types (float8, uint16), and for a tensor with attributes of its own.
# Without them, no tensor can be pickled. All four versions have them.
rebuild_tensor_v3: Any = torch._utils._rebuild_tensor_v3
rebuild_from_type_v2: Any = torch._tensor._rebuild_from_type_v2


# `_untyped_storage`, since the public attributes warn that TypedStorage is deprecated; `_cdata`, the address of the C++
# object, the same for all Python objects of a storage; and the argument `_internal`, with which torch does not warn.
# Without them, no tensor can be pickled or unpickled. All four versions have them.


def get_untyped_storage(storage: Any) -> Any:
    return getattr(storage, "_untyped_storage", storage)


def get_storage_id(storage: Any) -> int:
    return int(storage._cdata)


def make_typed_storage(storage: Any, dtype: Any) -> Any:
    make: Any = torch.storage.TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


# The flight recorder: worker/collectives.py.

FLIGHT_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")


def read_flight_recorder() -> list[dict[str, Any]]:
    """Return the collectives of this process by backend, in order, without stacks: for those torch imports torch._inductor,
    which takes a second.

    `_dump_fr_trace` has those of gloo, `_dump_nccl_trace` those of NCCL. torch 2.13 has both if built with NCCL; 2.4 to 2.9
    have only the latter. Without, only the stacks of the ranks show the cause of a hang.
    """
    bindings: Any = import_module("torch._C._distributed_c10d")
    entries: list[dict[str, Any]] = []
    for name in FLIGHT_RECORDERS:
        if dump := getattr(bindings, name, None):
            entries += pickle.loads(dump(True, False, False)).get("entries", ())
    return entries


def has_flight_recorder() -> bool:
    bindings = import_module("torch._C._distributed_c10d")
    return any(hasattr(bindings, name) for name in FLIGHT_RECORDERS)


# `_world` has the process groups, of which torch has no public list. Without `pg_names`, `pg_group_ranks` and `default_pg`,
# nobody knows which rank is missing in a collective. All four versions have them.


def _get_world() -> Any:
    return import_module("torch.distributed.distributed_c10d")._world


def get_group_names() -> dict[Any, str]:
    return dict(_get_world().pg_names)


def get_process_groups() -> dict[str, tuple[str, tuple[int, ...]]]:
    """By torch's names: the description of the group, and its global ranks. In `(4, 2)`, global rank 4 is its rank 0."""
    ranks = _get_world().pg_group_ranks
    groups = {}
    for group, name in get_group_names().items():
        numbers = ranks.get(group, {})
        groups[name] = getattr(group, "group_desc", ""), tuple(sorted(numbers, key=numbers.__getitem__))
    return groups


def get_group_name(group: Any) -> str:
    """Of the default group if None; empty if torch does not know it."""
    return get_group_names().get(_get_world().default_pg if group is None else group, "")


def is_of_torch(code: CodeType) -> bool:
    """Whether `code` can wait in a collective. Not code of torch.utils, such as that of a DataLoader."""
    folder = os.path.dirname(torch.__file__) + os.sep
    return code.co_filename.startswith(folder) and not code.co_filename.startswith(os.path.join(folder, "utils", ""))
