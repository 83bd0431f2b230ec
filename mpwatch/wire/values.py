"""What a rank sends back, as bytes: its value, or parts of an exception. `dumps` runs in the rank, `loads` in the watcher.

What came from the caller's `__main__` with the call goes back by its name, so that it comes out as the caller's own; what
else only cloudpickle can send goes by value.
"""

from __future__ import annotations

import pickle
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["dumps", "loads"]


def dumps(value: Any) -> bytes:
    """Pickle a value: by reference where that is possible, else by value. Raises what pickling raises.

    cloudpickle's import is paid for only by ranks that need it: those whose function came by value have it loaded.
    """
    if "cloudpickle" not in sys.modules:
        try:
            return pickle.dumps(value, protocol=5)
        except Exception:  # noqa: BLE001, S110  whatever plain pickle cannot do, cloudpickle tries next and raises its own
            pass
    from .pickler import dump_answer

    return dump_answer(value)


def loads(data: bytes) -> Any:
    """The value again. Raises what unpickling raises, and runs what the value's classes define."""
    import io

    return _AnswerUnpickler(io.BytesIO(data)).load()


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
