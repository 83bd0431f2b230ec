"""What a rank sends back: its value, in a bundle; parts of exceptions, in bytes. Packed in the rank, loaded by the watcher.

What came from the caller's `__main__` with the call goes back by its name, so that it comes out as the caller's own; what
else only cloudpickle can send goes by value.
"""

from __future__ import annotations

import copyreg
import pickle
import sys

from mpwatch.wire.pickling.call_payload import from_caller
from mpwatch.wire.pickling.pickle_buffers import REDUCERS, NullBundle, PickleBundle, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SMALL = 1 << 16  # bytes of a value that goes over the channel itself


def pack(value: Any) -> PickleBundle:
    """Pickle a value: by reference where that is possible, else by value. Raises what pickling raises, and OSError.

    cloudpickle's import is paid for only by ranks that need it: those whose function came by value have it loaded.
    """
    if "cloudpickle" not in sys.modules:
        try:
            return _packed(value, _plain_pickler)
        except OSError:  # the bundle's
            raise
        except Exception:  # noqa: BLE001, S110  whatever plain pickle cannot do, cloudpickle tries next and raises its own
            pass
    return _packed(value, _pickler)


def probe(value: Any) -> None:
    """Pickle one thing as `pack` would, for the sake of the exception that this raises."""
    _pickler(NullBundle()).dump(value)


def load(bundle: bytes | memoryview) -> Any:
    """The value again. Raises what unpickling raises, and runs what the value's classes define."""
    stream, buffers = opened(bundle)
    return _AnswerUnpickler(stream, buffers=buffers).load()


def dumps(part: Any) -> bytes:
    """The same of a part of an exception, which is small."""
    if "cloudpickle" not in sys.modules:
        try:
            return pickle.dumps(part, protocol=5)
        except Exception:  # noqa: BLE001, S110  as above
            pass
    import io

    from mpwatch.wire.pickling.pickler import AnswerPickler

    stream = io.BytesIO()
    AnswerPickler(stream, None, {}, from_caller).dump(part)
    return stream.getvalue()


def loads(data: bytes) -> Any:
    """That part again. Raises what unpickling raises, and runs what its classes define."""
    import io

    return _AnswerUnpickler(io.BytesIO(data)).load()


def _packed(value: Any, pickler: Callable[[PickleBundle], pickle.Pickler]) -> PickleBundle:
    bundle = PickleBundle("mpwatch-value", SMALL)
    try:
        pickler(bundle).dump(value)
        bundle.finish()
    except BaseException:
        bundle.close()
        raise
    return bundle


def _plain_pickler(bundle: PickleBundle) -> pickle.Pickler:
    pickler = pickle.Pickler(bundle, 5, buffer_callback=bundle.keep)
    pickler.dispatch_table = {**copyreg.dispatch_table, **REDUCERS, **_torch_reducers()}
    return pickler


def _pickler(bundle: PickleBundle | NullBundle) -> pickle.Pickler:
    from mpwatch.wire.pickling.pickler import AnswerPickler

    return AnswerPickler(bundle, bundle.keep, _torch_reducers(), from_caller)


def _torch_reducers() -> dict[type, Callable[[Any], Any]]:
    """For tensors, if there can be any."""
    if "torch.storage" not in sys.modules:
        return {}
    from mpwatch.wire.pickling.torch_storages import reducers

    return reducers()


class _AnswerUnpickler(pickle.Unpickler):
    """A class that went to the rank by value comes back as the very same class (cloudpickle keeps track of it).

    But cloudpickle would also give it the attributes that it had in the rank, and methods whose globals are not the
    caller's: the caller's class must stay as it is.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "cloudpickle.cloudpickle" and name in ("_make_skeleton_class", "_make_skeleton_enum"):
            from cloudpickle import cloudpickle

            # looked up before the first class is made
            self.known = set(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)
        if module == "cloudpickle.cloudpickle" and name == "_class_setstate":
            return self._set_up_if_new
        return super().find_class(module, name)

    def _set_up_if_new(self, cls: type, state: Any) -> type:
        from cloudpickle import cloudpickle

        if cls not in self.known:
            cloudpickle._class_setstate(cls, state)
        return cls
