"""A call that pickle alone can send: all that it is made of is found by name in modules other than `__main__`.

Most calls of a program that keeps its functions in modules are such, and cloudpickle's import, 25 ms, is more than all else
that a watcher does. Whatever is not plain raises, and goes the other way (pickler.py), which is always right.
"""

import copyreg
import pickle
import sys
from typing import Any

from .bundle import REDUCERS, Bundle, Trial
from .reducers import multiprocessing_reducers, torch_reducers

__all__ = ["PlainPickler", "may_be_plain"]


class PlainPickler(pickle.Pickler):
    """Raises for what it must not send by name.

    Args:
        bundle: where the pickle goes.
    """

    def __init__(self, bundle: Bundle | Trial) -> None:
        # before __init__, which is when the C pickler looks for it
        self.dispatch_table = {**multiprocessing_reducers(), **copyreg.dispatch_table, **REDUCERS, **torch_reducers()}
        super().__init__(bundle, 5, buffer_callback=bundle.keep)

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle for each object: functions and classes of `__main__`, and instances of these."""
        if getattr(obj, "__module__", None) == "__main__":
            raise pickle.PicklingError("of __main__")  # which nobody sees, and no repr of the user's is run for it
        return NotImplemented


def may_be_plain(fn: object) -> bool:
    """Whether it is worth a try."""
    if getattr(fn, "__module__", None) == "__main__":
        return False
    cloudpickle = sys.modules.get("cloudpickle")
    return cloudpickle is None or not cloudpickle.list_registry_pickle_by_value()
