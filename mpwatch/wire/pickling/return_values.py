"""Pickle return values and parts of exceptions in a rank, and unpickle them in the watcher.

A return value is pickled into a bundle, which has two pickles: the name of the value's type, and the value.

If a function or class came from the caller's `__main__`, the rank sends back only its name. The watcher finds the caller's
original function or class by this name. If only cloudpickle can pickle a function or class, the rank sends it by value.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from functools import cache

from mpwatch.wire.pickling.call_payload import caller_definitions
from mpwatch.wire.pickling.pickle_buffers import VIEW_REDUCERS, LazyReducers, NullBundle, OpenBundle, PickleBundle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_INLINE_SIZE = 1 << 16  # bytes; a value up to this size is sent over the channel itself


def pack(value: Any) -> PickleBundle:
    """Pickle a value. Raises whatever pickling raises, or OSError if the bundle cannot be written.

    If the rank has not loaded cloudpickle, the rank tries plain pickle first, because the import of cloudpickle takes time.
    """
    if value is None:  # most functions return None
        bundle = PickleBundle("", 0)
        bundle.body = pack_none()
        return bundle
    if "cloudpickle" not in sys.modules:
        try:
            return _pack(value, _make_plain_pickler)
        except OSError:  # the bundle cannot be written
            raise
        except Exception:  # noqa: BLE001, S110  cloudpickle is tried next, and its exception is raised
            pass
    return _pack(value, _make_pickler)


@cache
def pack_none() -> bytes:
    """Return the body of the bundle for the value None."""
    return _pack(None, _make_plain_pickler).body


def probe(value: Any) -> None:
    """Check whether a value can be pickled, and discard the pickle. Raises what pickling raises."""
    _make_pickler(NullBundle()).dump(value)


def open_value(bundle: bytes | memoryview) -> tuple[str, pickle.Unpickler]:
    """In the watcher: return the name of the value's type, and an unpickler whose `load` rebuilds the value.

    `load` can run user code, for example a method `__setstate__`, so `load` can raise any exception.
    """
    opened = OpenBundle(bundle)
    unpickler = _AnswerUnpickler(opened.stream, buffers=opened.buffers)
    return unpickler.load(), unpickler


def dumps(part: Any) -> bytes:
    """Pickle a part of an exception. Raises what pickling raises."""
    if "cloudpickle" not in sys.modules:
        try:
            return pickle.dumps(part, protocol=5)
        except Exception:  # noqa: BLE001, S110  cloudpickle is tried next
            pass
    import io

    try:
        from mpwatch.wire.pickling.pickler import AnswerPickler
    except Exception:  # noqa: BLE001  see `_make_pickler`
        return pickle.dumps(part, protocol=5)
    stream = io.BytesIO()
    AnswerPickler(stream, None, {}, caller_definitions).dump(part)
    return stream.getvalue()


def loads(data: bytes) -> Any:
    """Unpickle a part of an exception. `loads` can run user code, so `loads` can raise any exception."""
    import io

    return _AnswerUnpickler(io.BytesIO(data)).load()


def _pack(value: Any, pickler: Callable[[PickleBundle], pickle.Pickler]) -> PickleBundle:
    bundle = PickleBundle("mpwatch-value", MAX_INLINE_SIZE)
    try:
        into_bundle = pickler(bundle)
        into_bundle.dump(_get_type_name(type(value)))  # for the error text if the caller cannot rebuild the value
        into_bundle.dump(value)
        bundle.finish()
    except BaseException:
        bundle.close()
        raise
    return bundle


def _get_type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _make_plain_pickler(bundle: PickleBundle | NullBundle) -> pickle.Pickler:
    pickler = pickle.Pickler(bundle, 5, buffer_callback=bundle.keep_buffer)
    pickler.dispatch_table = LazyReducers(_collect_reducers)
    return pickler


def _collect_reducers() -> dict[type, Callable[[Any], Any]]:
    return {**copyreg.dispatch_table, **VIEW_REDUCERS, **_get_torch_reducers()}


def _make_pickler(bundle: PickleBundle | NullBundle) -> pickle.Pickler:
    try:
        from mpwatch.wire.pickling.pickler import AnswerPickler
    except Exception:  # noqa: BLE001  the function has run for long: the package was removed or replaced, or cannot be read
        return _make_plain_pickler(bundle)
    return AnswerPickler(bundle, bundle.keep_buffer, _get_torch_reducers(), caller_definitions)


def _get_torch_reducers() -> dict[type, Callable[[Any], Any]]:
    """Return the reducers for torch's tensors, or an empty dict if torch is not loaded."""
    if "torch.storage" not in sys.modules:
        return {}
    try:
        from mpwatch.wire.pickling.torch_storages import reducers
    except Exception:  # noqa: BLE001  see `_make_pickler`. torch then pickles its tensors itself
        return {}
    return reducers()


class _AnswerUnpickler(pickle.Unpickler):
    """An unpickler that does not change the caller's classes.

    If the rank sends back a class that the caller has sent by value, cloudpickle finds the caller's original class. With a
    plain unpickler, cloudpickle would overwrite the attributes and methods of the caller's class.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "cloudpickle.cloudpickle" and name in ("_make_skeleton_class", "_make_skeleton_enum"):
            from cloudpickle import cloudpickle

            # This runs before the first class is created.
            self.known = set(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)
        if module == "cloudpickle.cloudpickle" and name == "_class_setstate":
            return self._set_state_if_new
        return super().find_class(module, name)

    def _set_state_if_new(self, cls: type, state: Any) -> type:
        from cloudpickle import cloudpickle

        if cls not in self.known:
            cloudpickle._class_setstate(cls, state)
        return cls
