"""What a rank sends back, as bytes: its value, or parts of an exception. Runs in the rank; `loads` in the watcher."""

from __future__ import annotations

import pickle
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["dumps"]


def dumps(value: Any) -> bytes:
    """Pickle a value: by reference where that is possible, else by value. Raises what pickling raises.

    cloudpickle's import is paid for only by ranks that need it: those whose function came by value have it loaded.
    """
    if "cloudpickle" not in sys.modules:
        try:
            return pickle.dumps(value, protocol=5)
        except Exception:  # noqa: BLE001, S110  whatever plain pickle cannot do, cloudpickle tries next and raises its own
            pass
    import cloudpickle

    data: bytes = cloudpickle.dumps(value, protocol=5)
    return data
