"""Arguments and return values within one process: they arrive whole, large ones without a copy, and memory is freed."""

import ctypes
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ma

from mpwatch.wire.pickling import call_payload, return_values
from mpwatch.wire.pickling.call_payload import FunctionCall
from mpwatch.wire.pickling.packed import MIN_BUFFER_SIZE, Unpacked, map_packed

MANY = MIN_BUFFER_SIZE // 8 + 1  # numbers that make a large buffer


@pytest.fixture(autouse=True)
def _fresh_main_module(monkeypatch):
    """`unpack` writes to the module `__main__`."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))


def send_as_argument(thing):
    packed = call_payload.pack(FunctionCall(print, (thing,), {}, None))
    try:
        return call_payload.unpack(packed.body, [os.dup(fd) for fd in packed.fds], len).args[0]
    finally:
        packed.close()


def send_as_value(thing):
    packed = return_values.pack(thing)
    try:
        return Unpacked(packed.body or map_packed(packed.file.fileno())).load()
    finally:
        packed.close()


both_ways = pytest.mark.parametrize("sent", [send_as_argument, send_as_value])


def list_mappings():
    """Return the address ranges of mapped files in this process."""
    found = re.findall(r"^(\S+)-(\S+) .*[:/]mpwatch-\S+ \(deleted\)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return [range(int(begin, 16), int(end, 16)) for begin, end in found]


@pytest.mark.parametrize(
    ("array", "is_mapped"),
    [
        (np.asfortranarray(np.arange(2.0 * MANY).reshape(2, -1)), True),
        (np.arange(MANY, dtype=">i8"), True),
        (np.zeros(MANY, dtype=[("a", "i4"), ("b", "f8", (2,))]), True),
        (np.arange(3), False),
        (np.arange(4.0 * MANY)[::2], True),  # not contiguous
        (np.array([{"a": 1}, None], dtype=object), False),
        (np.arange(MANY).astype("datetime64[s]"), False),
        (np.empty((3, 0)), False),
        (ma.masked_equal(np.arange(MANY), 3), False),
    ],
)
@both_ways
def test_an_array_comes_whole_and_writable(sent, array, is_mapped):
    came = sent(array)
    assert type(came) is type(array)
    assert (came.dtype, came.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(came, array)
    assert any(came.__array_interface__["data"][0] in mapping for mapping in list_mappings()) is is_mapped
    assert not (is_mapped and array.flags.forc) or came.flags.f_contiguous is array.flags.f_contiguous
    came[...] = came.flat[0] if came.size else 0


@both_ways
@pytest.mark.parametrize("size", [0, 12, 6 * MANY])
def test_views_of_all_sizes(sent, size):
    grid = memoryview(np.arange(2.0 * size).reshape(2, size))
    came = sent(grid)
    assert (came.tobytes(), came.readonly) == (grid.tobytes(), False)
    assert (came.format, came.shape) == ((grid.format, grid.shape) if size else ("B", (0,)))


@both_ways
@pytest.mark.parametrize("size", [3, MANY])
def test_read_only_memory_stays_read_only(sent, size):
    array = np.zeros(size)
    array.flags.writeable = False
    assert not sent(array).flags.writeable
    assert sent(memoryview(array)).readonly


BAD_VIEWS = [
    (memoryview(bytes(100))[::2], "a memoryview that is not contiguous"),
    (memoryview(np.zeros(3, complex)), "cannot pickle a memoryview of the format 'Z"),
    (memoryview((ctypes.c_int * MANY)()), "cannot pickle a memoryview of the format '<"),
]


@both_ways
@pytest.mark.parametrize(("view", "text"), BAD_VIEWS)
def test_a_memoryview_that_cannot_be_rebuilt_is_refused(sent, view, text):
    with pytest.raises(TypeError, match=text):
        sent(view)


@both_ways
def test_identical_objects_stay_identical(sent):
    array, view = np.zeros(MANY), memoryview(bytearray(MIN_BUFFER_SIZE))
    first, (second,), third, fourth = sent((array, [array], view, view))
    assert (first is second, third is fourth) == (True, True)


SIZES = [0, 1, 7000, MIN_BUFFER_SIZE - 1, MIN_BUFFER_SIZE, MIN_BUFFER_SIZE + 1, 3 * MIN_BUFFER_SIZE]
KINDS = [bytes, bytearray, np.zeros, lambda size: memoryview(bytes(size)), lambda size: "é" * size]
THINGS = st.builds(lambda make, size: make(size), st.sampled_from(KINDS), st.sampled_from(SIZES))


@settings(max_examples=60)
@given(things=st.lists(THINGS, max_size=6), sent=st.sampled_from([send_as_argument, send_as_value]))
def test_any_mixture_of_small_and_large(things, sent):
    for came, thing in zip(sent(things), things, strict=True):
        assert type(came) is type(thing)
        np.testing.assert_array_equal(came, thing)


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


@both_ways
def test_buffers_are_released_if_pickling_fails(sent):
    data = bytearray(MIN_BUFFER_SIZE)
    with pytest.raises(TypeError):
        sent([memoryview(data), Unpicklable()])
    data.append(1)  # it would raise if a buffer of it were held


# --- Parts: each rank loads what all ranks get, and its own part


def send_parts(parts, args=(None,)):
    """Return the calls that the ranks get, and the size of what is sent."""
    packed = call_payload.pack(FunctionCall(print, args, {"name": None}, None, parts=parts))
    size = os.fstat(packed.fds[0]).st_size
    choices = [lambda _, number=number: number for number in range(len(parts))]
    try:
        return [call_payload.unpack(packed.body, [*map(os.dup, packed.fds)], choose) for choose in choices], size
    finally:
        packed.close()


def test_each_rank_gets_its_own_values_and_what_several_have_is_sent_once():
    own, common = [np.full(MANY, rank) for rank in range(4)], np.arange(MANY)
    calls, size = send_parts([{0: [array, common], "name": array} for array in own], args=(None, common))
    assert size < 5 * common.nbytes + 10 * os.sysconf("SC_PAGESIZE")
    for rank, call in enumerate(calls):
        (array, in_part), in_all = call.args
        assert call.kwargs["name"] is array
        assert set(array) == {rank}
        assert (in_part == common).all()
        assert (in_all == common).all()
        array[:] = in_part[:] = in_all[:] = -1  # no other rank sees it
