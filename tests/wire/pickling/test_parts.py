"""Parts of a call: each rank loads the common part of the bundle and its own, and shares no memory with another object."""

import os
import sys
from types import ModuleType

import numpy as np
import pytest

from mpwatch.wire.pickling import call_payload
from mpwatch.wire.pickling.call_payload import Call
from mpwatch.wire.pickling.pickle_buffers import MIN_BUFFER_SIZE

MANY = MIN_BUFFER_SIZE // 8 + 1  # numbers that make a large buffer


@pytest.fixture(autouse=True)
def main(monkeypatch):
    """`unpack` writes to the module `__main__`."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def unpack(packed, number):
    return call_payload.unpack(packed.body, [os.dup(fd) for fd in packed.fds], lambda _: number)


def send(parts, args=(None,)):
    """Return the arguments that each rank gets, and the size of the bundle."""
    packed = call_payload.pack(Call(print, args, {"name": None}, None, parts=parts))
    try:
        calls = [unpack(packed, number) for number in range(len(parts))]
        return [(*call.args, call.kwargs["name"]) for call in calls], packed._bundle.size
    finally:
        packed.close()


@pytest.mark.parametrize("factor", [1, MANY])
def test_each_rank_gets_its_own_values(factor):
    values, _ = send([{0: "a" * factor, "name": 1}, {0: "b" * factor, "name": 2}, {0: "c", "name": 3}])
    assert values == [("a" * factor, 1), ("b" * factor, 2), ("c", 3)]


def test_large_arrays_are_sent_once_each():
    arrays = [np.full(MANY, rank) for rank in range(4)]
    common = np.arange(MANY)
    values, size = send([{0: array, "name": array[:2]} for array in arrays], args=(None, common))
    for rank, (array, same, beginning) in enumerate(values):
        assert (array == rank).all()
        assert (same == common).all()
        assert (beginning == rank).all()
        array[:] = -1  # a rank may write to its own
    assert size < 5 * common.nbytes + 6 * os.sysconf("SC_PAGESIZE")


def test_an_array_for_several_ranks_is_written_once():
    array = np.arange(8 * MANY)
    values, size = send([{0: array, "name": array}] * 3)
    assert size < 2 * array.nbytes
    for got, same in values:
        assert got is same
        assert (got == array).all()


def test_two_arrays_of_a_rank_do_not_share_memory():
    array = np.arange(MANY)
    values, _ = send([{0: array, "name": array[:]}, {0: array, "name": array[:]}])
    for first, second in values:
        first[:] = -1
        assert (second == array).all()


def test_an_object_of_the_call_is_the_same_object_in_each_part():
    thing = ["shared"]
    values, _ = send([{0: thing, "name": 0}, {0: [thing], "name": 1}], args=(None, thing))
    (first, same, _), (second, other, _) = values
    assert first is same
    assert second[0] is other


def test_an_object_of_several_parts_reaches_each():
    thing = ["shared"]
    assert send([{0: thing, "name": thing}] * 3)[0] == [(thing, thing)] * 3


def test_classes_of_main_are_the_same_in_the_call_and_in_a_part(main):
    exec("class Point: pass\nclass Other: pass\ndef fn(): return Point", vars(main))
    point, other = main.Point(), main.Other()
    packed = call_payload.pack(Call(main.fn, (None,), {}, None, parts=[{0: 1}, {0: point}, {0: other}]))
    main.__dict__.pop("Other")
    try:
        for number, name in ((1, "Point"), (2, "Other")):
            call = unpack(packed, number)
            assert type(call.args[0]) is vars(main)[name]
            assert call.fn() is main.Point
    finally:
        packed.close()


def test_a_function_of_a_part_has_its_source(main):
    import linecache

    linecache.cache["<cell 7>"] = (10, None, ["def f(): return 1\n"], "<cell 7>")
    exec(compile("def f(): return 1", "<cell 7>", "exec"), vars(main))
    packed = call_payload.pack(Call(print, (None,), {}, None, parts=[{0: 1}, {0: main.f}]))
    del linecache.cache["<cell 7>"]
    try:
        call = unpack(packed, 1)
    finally:
        packed.close()
    assert call.args[0]() == 1
    assert linecache.getline("<cell 7>", 1) == "def f(): return 1\n"
