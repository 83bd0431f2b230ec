"""Return values, packed and opened in one process: memory of copied bundles, and the caller's own classes and functions."""

import os
import sys
from types import ModuleType

import numpy as np
import pytest

from mpwatch.wire.pickling import call_payload, return_values
from mpwatch.wire.pickling.pickle_buffers import MIN_BUFFER_SIZE

DEFINITIONS = """
def double(x):
    return 2 * x

class Model:
    class Layer:
        pass

    def forward(self, x):
        return double(x)
"""


def test_an_array_in_a_bundle_that_was_copied_is_writable():
    """The watcher reads a short file, and maps a long one."""
    packed = return_values.pack(np.full(MIN_BUFFER_SIZE, 1.5))
    try:
        copied = os.pread(packed.file.fileno(), packed.size, 0)
    finally:
        packed.close()
    came = return_values.open_value(copied)[1].load()
    came += 1
    assert set(came) == {2.5}


def test_a_value_leaves_its_class_in_the_caller_as_it_is():
    class Counter:
        step = 1

    packed = return_values.pack(Counter())
    try:
        Counter.step = 2  # the caller has changed the class since the rank pickled the value
        came = return_values.open_value(packed.body)[1].load()
    finally:
        packed.close()
    assert type(came) is Counter
    assert came.step == 2


@pytest.fixture
def become(monkeypatch):
    """Return a function that makes a module the `__main__` of this process."""
    yield lambda main: monkeypatch.setitem(sys.modules, "__main__", main)
    call_payload.caller_definitions.clear()


def test_a_function_that_came_with_another_definition_returns_as_the_caller_s_own(become):
    """The argument is `Layer`. `Model` comes with it since it contains it, and `double` since `Model` uses it."""
    callers_main, ranks_main = ModuleType("__main__"), ModuleType("__main__")
    exec(DEFINITIONS, vars(callers_main))
    become(callers_main)
    call = call_payload.pack(call_payload.Call(print, (callers_main.Model.Layer,), {}, None))
    become(ranks_main)
    call_payload.unpack(call.body, [], len)
    value = return_values.pack(ranks_main.double)
    become(callers_main)
    assert return_values.open_value(value.body)[1].load() is callers_main.double
    assert ranks_main.double is not callers_main.double
    call.close()
    value.close()
