"""Reducers turn an object, such as a socket or a tensor, into values that can be pickled. torch is never imported here.

Two tables are made of them, and made again only if another module has registered a reducer: one for calls, with what
multiprocessing and torch have registered for spawned processes, and one for values, exceptions and other programs.
"""

import copyreg
import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from types import CellType, ModuleType
from typing import Any, TypeVar

import cloudpickle
from cloudpickle import cloudpickle as internals

from mpwatch.wire.pickling import definitions
from mpwatch.wire.pickling.packed import VIEW_REDUCERS
from mpwatch.wire.pickling.per_rank import PerRank, refuse_per_rank

_spawn_pickler: Any = ForkingPickler  # typeshed does not have the attribute `_extra_reducers`
Reduced = tuple[Any, ...]
Reducers = Mapping[type, Callable[[Any], Any]]
_tables: dict[bool, tuple[Any, Reducers]] = {}  # for calls and for values: what the table was made of, and the table


def get_table(*, for_call: bool) -> Reducers:
    loaded = "torch.storage" in sys.modules, "numpy" in sys.modules
    sources = copyreg.dispatch_table, _spawn_pickler._extra_reducers if for_call else {}, loaded
    if for_call not in _tables or _tables[for_call][0] != sources:
        # each copy is one call of C code, since another thread may be importing torch
        copies = dict(sources[0]), dict(sources[1]), loaded
        _tables[for_call] = copies, _make_table(*copies, for_call=for_call)
    return _tables[for_call][1]


def _make_table(registered: Reducers, spawning: Reducers, loaded: tuple[bool, bool], *, for_call: bool) -> Reducers:
    table: dict[type, Callable[[Any], Any]] = {**spawning, **registered, **cloudpickle.Pickler.dispatch_table.maps[0]}
    del table[TypeVar]  # see pickler.py
    table |= {**OBJECTS, **VIEW_REDUCERS}
    has_torch, has_numpy = loaded
    if has_numpy:
        import numpy as np

        from mpwatch.wire.pickling import numpy_arrays

        table[np.ndarray] = numpy_arrays.reduce_array
        if for_call:  # another program may have no such file
            table[np.memmap] = numpy_arrays.reduce_memmap
    if has_torch:
        import torch

        from mpwatch.wire.pickling.torch_storages import REDUCERS, share_or_copy

        table |= REDUCERS
        # Share only what is shared: torch's own reducers would move every CPU tensor of the caller into shared memory.
        shared = {cls: share for cls, share in spawning.items() if cls.__module__.partition(".")[0] == "torch"}
        table |= {cls: share_or_copy(share, REDUCERS.get(cls, _reduce_plain)) for cls, share in shared.items()}
        add = torch.ops.aten.add
        table |= {type(add): _reduce_op, type(add.Tensor): _reduce_op}
    if for_call:
        table[PerRank] = refuse_per_rank
    return table


def _reduce_op(op: Any) -> Any:
    import torch

    return attrgetter(str(op)), (torch.ops,)


def _reduce_plain(obj: Any) -> Any:
    return obj.__reduce_ex__(5)


# --- Objects of Python that neither pickle nor cloudpickle can send


def is_made_here(module: Any) -> bool:
    """Return whether this program has made the module, so that no other process can import it."""
    name = module.__name__
    if name in definitions.MAIN_NAMES:
        return True
    if type(module) is not ModuleType or module.__spec__ is not None or hasattr(module, "__file__"):
        return False
    top, dot, _ = name.partition(".")  # a module in C can make others, as torch._C does
    return not dot or top not in sys.modules or is_made_here(sys.modules[top])


def _reduce_module(module: ModuleType) -> Any:
    if module.__name__ in definitions.MAIN_NAMES or not is_made_here(module):
        return internals._module_reduce(module)
    state = {name: value for name, value in vars(module).items() if name != "__builtins__"}
    return definitions.make_module, (module.__name__,), state, None, None, definitions.fill_attributes


def _reduce_cell(cell: CellType) -> Reduced:
    """Two functions that share a variable still share it. cloudpickle gives each function a cell of its own."""
    try:
        content = (cell.cell_contents,)
    except ValueError:  # it is empty
        return definitions.make_cell, ()
    return definitions.make_cell, (), content, None, None, definitions.fill_cell


def _reduce_cached_property(prop: Any) -> Reduced:
    state = {name: value for name, value in vars(prop).items() if name != "lock"}  # Python 3.11 has a lock
    return functools.cached_property, (prop.func,), state


OBJECTS: Reducers = {
    CellType: _reduce_cell,
    ModuleType: _reduce_module,
    functools.cached_property: _reduce_cached_property,
    weakref.WeakKeyDictionary: lambda weak: (weakref.WeakKeyDictionary, (dict(weak),)),
    weakref.WeakValueDictionary: lambda weak: (weakref.WeakValueDictionary, (dict(weak),)),
    weakref.ReferenceType: lambda ref: (
        (weakref.ref, (ref(),)) if ref() is not None else (definitions.make_dead_reference, ())
    ),
}
