"""Pickle return values and exceptions in a rank, and load them in the caller.

Of what came from the caller's `__main__`, the rank sends back only the names, so that the caller gets its own functions and
classes (pickler.py).
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from contextlib import suppress
from types import FunctionType

from mpwatch.wire.pickling.definitions import MAIN_NAMES, received
from mpwatch.wire.pickling.packed import VIEW_REDUCERS, Packed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")
    MakePickler = Callable[[Any, Any], pickle.Pickler]  # from a stream and a function that keeps large buffers

MAX_INLINE_SIZE = 1 << 16  # bytes; a value up to this size is sent over the channel itself


def pack(value: Any) -> Packed:
    """Pickle a value. Raises whatever pickling raises, or OSError if the file cannot be written."""
    return _dump_with_either(lambda make: _pack(value, make))


def dumps(part: Any) -> bytes:
    """Pickle an exception, or another value that is a part of a message. Raises what pickling raises."""

    def dump(make: MakePickler) -> bytes:
        stream = io.BytesIO()
        make(stream, None).dump(part)
        return stream.getvalue()

    return _dump_with_either(dump)


def loads(data: bytes) -> Any:
    """Load what `dumps` has pickled. This can run user code, so it can raise any exception."""
    return pickle.loads(data)


def _dump_with_either(dump: Callable[[MakePickler], T]) -> T:
    """Try plain pickle first if the pickler is not loaded: its import takes a rank 6 ms, and that of cloudpickle 11 ms."""
    if "mpwatch.wire.pickling.pickler" not in sys.modules:
        try:
            return dump(PlainPickler)
        except OSError:  # the file cannot be written
            raise
        except Exception:  # noqa: BLE001, S110  cloudpickle is tried next, and its exception is raised
            pass
    from mpwatch.wire.pickling.pickler import Pickler

    return dump(Pickler)


def _pack(value: Any, make: MakePickler) -> Packed:
    packed = Packed("mpwatch-value", MAX_INLINE_SIZE)
    try:
        pickler = make(packed, packed.keep)
        pickler.dump(value)
        packed.end_pickle()
        return packed.finish(about=_get_type_name(type(value)))  # for the error text if the caller cannot rebuild the value
    except BaseException:
        packed.close()
        raise


def _get_type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


class PlainPickler(pickle.Pickler):
    def __init__(self, stream: Any, keep: Any) -> None:
        self.dispatch_table = {**copyreg.dispatch_table, **VIEW_REDUCERS, **_get_torch_reducers()}
        super().__init__(stream, 5, buffer_callback=keep)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ in MAIN_NAMES:
            top = obj.__qualname__.partition(".")[0]
            if top not in received or vars(sys.modules["__main__"]).get(top) is not received[top]:
                raise pickle.PicklingError(f"the rank has made {obj.__qualname__} itself")
        return NotImplemented


def _get_torch_reducers() -> dict[type, Callable[[Any], Any]]:
    if "torch.storage" in sys.modules:
        with suppress(ImportError, OSError):  # the function has left the folder of the package; torch pickles tensors, too
            from mpwatch.wire.pickling.torch_storages import REDUCERS

            return REDUCERS
    return {}
