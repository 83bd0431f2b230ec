"""Pickle the arrays that NumPy itself copies into the pickle, so that each rank gets a copy: subclasses, arrays
that are not contiguous, and memmaps. All ranks map one memory instead, or a memmap's own file.

This module imports numpy, so other modules import this module only if numpy is already loaded.
"""

import mmap
import os
from typing import Any

import numpy as np

from mpwatch.wire.pickling.definitions import fill_attributes


def reduce_array(array: Any) -> Any:
    is_whole = array.flags.c_contiguous or array.flags.f_contiguous or array.dtype.hasobject
    return (array if is_whole else np.ascontiguousarray(array)).__reduce_ex__(5)


def reduce_subclass(array: Any) -> Any:
    cls = type(array)
    if any(getattr(cls, name) is not getattr(np.ndarray, name) for name in ("__reduce__", "__reduce_ex__", "__setstate__")):
        return array.__reduce_ex__(5)
    make = _rebuild_subclass, (array.view(np.ndarray), cls)
    return (*make, vars(array), None, None, fill_attributes) if getattr(array, "__dict__", None) else make


def reduce_memmap(array: Any) -> Any:
    """Open the file again, if the array is a part of it."""
    memory, path = array._mmap, array.filename
    if memory is None or array.mode == "c" or not array.flags.c_contiguous or path is None or not os.path.exists(path):
        return reduce_array(array.view(np.ndarray))
    mapped_from = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    start = np.frombuffer(memory, np.uint8).ctypes.data
    offset = mapped_from + array.ctypes.data - start
    return np.memmap, (os.path.abspath(path), array.dtype, array.mode.replace("w", "r"), offset, array.shape)


def _rebuild_subclass(array: Any, cls: Any) -> Any:
    return array.view(cls)
