"""Arguments and return values: they arrive complete, without copies, each rank writes to its own, and memory is freed."""

import ctypes
import functools
import gc
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ma

import mpwatch
from mpwatch.watcher.processes.rank_handle import MAX_COPY_SIZE
from mpwatch.wire.pickling import call_payload, return_values
from mpwatch.wire.pickling.call_payload import PlainPickler
from mpwatch.wire.pickling.pickle_buffers import MIN_BUFFER_SIZE, NullBundle, map_bundle
from support import functions
from support.process_state import SPAWN, descriptors
from support.programs import python
from wire.pickling import payload_functions

MANY = MIN_BUFFER_SIZE // 8 + 1  # numbers that make a large buffer


@pytest.fixture(autouse=True)
def _fresh_main_module(monkeypatch):
    """`unpack` writes to the module `__main__`."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))


def send_as_argument(thing):
    packed = call_payload.pack(call_payload.Call(print, (thing,), {}, None))
    try:
        return call_payload.unpack(packed.body, [os.dup(fd) for fd in packed.fds], len).args[0]
    finally:
        packed.close()


def send_as_value(thing):
    packed = return_values.pack(thing)
    try:
        return return_values.open_value(packed.body or map_bundle(packed.file.fileno()))[1].load()
    finally:
        packed.close()


def list_mappings():
    """Return the address ranges of mapped bundles in this process."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:mpwatch-" in line]
    return [range(*(int(end, 16) for end in line.split()[0].split("-"))) for line in lines]


def is_mapped(array):
    return any(array.__array_interface__["data"][0] in mapping for mapping in list_mappings())


both_ways = pytest.mark.parametrize("sent", [send_as_argument, send_as_value])
ARRAYS = {
    "C order": np.arange(2.0 * MANY).reshape(2, -1),
    "Fortran order": np.asfortranarray(np.arange(2.0 * MANY).reshape(2, -1)),
    "of bytes": np.arange(3 * MIN_BUFFER_SIZE, dtype="uint8"),
    "of numbers in another order of bytes": np.arange(MANY, dtype=">i8"),
    "structured": np.zeros(MANY, dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "complex": np.full(MANY, 1 + 2j),
}
COPIED = {
    "small": np.arange(3),
    "not contiguous": np.arange(4.0 * MANY)[::2],
    "of objects": np.array([{"a": 1}, None], dtype=object),
    "of times": np.arange(MANY).astype("datetime64[s]"),
    "0-d": np.array(1.5),
    "empty": np.empty((3, 0)),
    "masked": ma.masked_equal(np.arange(MANY), 3),
}


@both_ways
@pytest.mark.parametrize("kind", [*ARRAYS, *COPIED])
def test_an_array_comes_whole_and_writable(sent, kind):
    array = {**ARRAYS, **COPIED}[kind]
    came = sent(array)
    assert type(came) is type(array)
    assert (came.dtype, came.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(came, array)
    assert is_mapped(came) is (kind in ARRAYS)
    assert came.flags.f_contiguous is array.flags.f_contiguous or kind in COPIED
    assert came.flags.writeable
    came[...] = came.flat[0] if came.size else 0


@both_ways
def test_read_only_memory_stays_read_only(sent):
    for size in (3, MANY):
        array = np.zeros(size)
        array.flags.writeable = False
        assert not sent(array).flags.writeable
        assert sent(memoryview(array)).readonly


@both_ways
@pytest.mark.parametrize("size", [0, 12, 6 * MANY])
def test_bytes_of_all_kinds(sent, size):
    data = os.urandom(size)
    assert sent([data, bytearray(data), memoryview(data)]) == [data, bytearray(data), memoryview(data)]
    grid = memoryview(np.arange(2.0 * size).reshape(2, size))
    came = sent(grid)
    assert came.tobytes() == grid.tobytes()
    assert (came.format, came.shape) == ((grid.format, grid.shape) if size else ("B", (0,)))
    assert not came.readonly


@both_ways
def test_a_memoryview_with_gaps_cannot_be_sent(sent):
    with pytest.raises(TypeError, match="a memoryview that is not contiguous"):
        sent(memoryview(bytes(100))[::2])


@both_ways
@pytest.mark.parametrize("items", [np.zeros(3, complex), np.zeros(3, ">i4"), (ctypes.c_int * MANY)()])
def test_a_memoryview_of_an_unsupported_format_is_refused_when_it_is_pickled(sent, items):
    """The unpickling process could not name the object."""
    with pytest.raises(TypeError, match=r"cannot pickle a memoryview of the format '[Z><]"):
        sent(memoryview(items))


@both_ways
def test_identical_objects_stay_identical(sent):
    array, view = np.zeros(MANY), memoryview(bytearray(MIN_BUFFER_SIZE))
    first, (second,), third, fourth = sent((array, [array], view, view))
    assert first is second
    assert third is fourth
    first[1] = 5
    assert second[1] == 5


@both_ways
def test_it_takes_memory_until_the_last_array_is_gone_and_no_descriptor(sent):
    before, open_before = list_mappings(), descriptors()
    first, second = sent([np.zeros(MANY), np.zeros(MANY)])
    row = second[3:]
    assert len(list_mappings()) == len(before) + 1
    assert descriptors() == open_before
    del first, second
    assert len(list_mappings()) == len(before) + 1
    row[:] = 1
    del row
    assert list_mappings() == before


@both_ways
def test_a_finaliser_in_a_cycle_may_look_at_what_came(sent):
    """A weakref callback of the mapping would run before the finalizer."""
    seen = []

    class Node:
        def __del__(self):
            seen.append(self.view[5])

    node = Node()
    node.me, node.view = node, sent(memoryview(bytes(range(256)) * MIN_BUFFER_SIZE))
    del node
    gc.collect()
    assert seen == [5]


@both_ways
def test_without_ctypes_a_mapping_keeps_a_descriptor(sent, monkeypatch):
    """As in a Python that was built without libffi."""
    monkeypatch.setitem(sys.modules, "ctypes", None)
    open_before = descriptors()
    came = sent(memoryview(bytearray(MIN_BUFFER_SIZE)))
    assert came.nbytes == MIN_BUFFER_SIZE
    came[3] = 1
    kept = sys.version_info < (3, 13)
    assert len(descriptors()) == len(open_before) + kept
    del came
    assert descriptors() == open_before


def test_small_calls_need_no_file():
    with_connections = SPAWN.Pipe()
    for args, number in ((([1, 2], "three"), 0), (with_connections, 2)):
        packed = call_payload.pack(call_payload.Call(print, args, {}, None))
        assert (len(packed.fds), bool(packed.body)) == (number, True)
        packed.close()
    for connection in with_connections:
        connection.close()


PARTS = st.one_of(
    st.sampled_from([0, 1, 100, MIN_BUFFER_SIZE - 1, MIN_BUFFER_SIZE, MIN_BUFFER_SIZE + 1, 3 * MIN_BUFFER_SIZE]).map(
        lambda size: np.arange(size, dtype="uint8")
    ),
    st.sampled_from([0, 1, 7000, MIN_BUFFER_SIZE - 1, MIN_BUFFER_SIZE, 3 * MIN_BUFFER_SIZE]).map(bytes),
    st.sampled_from([1, 7000, MIN_BUFFER_SIZE, 3 * MIN_BUFFER_SIZE]).map(lambda size: "é" * size),
)


@settings(max_examples=60)
@given(parts=st.lists(PARTS, max_size=6), sent=st.sampled_from([send_as_argument, send_as_value]))
def test_any_mixture_of_small_and_large(parts, sent):
    for came, part in zip(sent(parts), parts, strict=True):
        np.testing.assert_array_equal(came, part)


def test_bytes_that_are_not_a_bundle_are_refused():
    for data in (b"", b"x", bytes(100), b"x" * (1 << 20)):
        with pytest.raises(ValueError, match="not a bundle"):
            return_values.open_value(data)


@both_ways
def test_buffers_are_released_if_pickling_fails(sent):
    data = bytearray(MIN_BUFFER_SIZE)
    with pytest.raises(TypeError):
        sent([memoryview(data), payload_functions.Unpicklable()])
    data.append(1)  # it would raise if a buffer of it were held


# ---------------------------------------------------------------------------------------------------------- end to end


def test_each_rank_may_write_to_its_own_view_of_the_same_memory(barrier):
    array = np.full(MANY, 7.0)
    came = mpwatch.run(functions.write_rank, 3, args=(array, barrier)).return_values
    assert [came[rank][0] for rank in range(3)] == [{0.0}, {1.0}, {2.0}]
    assert len(set.union(*(inodes for _, inodes, _ in came.values()))) == 1
    assert not any(links for _, _, links in came.values())
    assert set(array) == {7.0}


def test_results_are_the_caller_s_to_write_to():
    before, open_before = list_mappings(), descriptors()
    result = mpwatch.run(functools.partial(np.full, MAX_COPY_SIZE // 8), 3, args=(1.5,))
    assert descriptors() == open_before
    first, second, third = result
    first[:] = 0
    assert set(second) == {1.5}
    assert len(list_mappings()) == len(before) + 3
    del result, first, second
    assert third[5] == 1.5
    del third
    assert list_mappings() == before


def test_short_results_take_no_mapping():
    """A process may have only 65,530 mappings."""
    before = list_mappings()
    came = mpwatch.run(functools.partial(np.full, MANY), 1, args=(1.5,))[0]
    assert list_mappings() == before
    came += 1
    assert set(came) == {2.5}


def test_values_of_a_failed_run_are_not_kept():
    before = list_mappings()
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(payload_functions.rank_0_returns_1_mib_then_rank_1_fails, 2)
    assert caught.value.root_cause.rank == 1
    assert list_mappings() == before


MEMORY = """
import functools, re, sys
import mpwatch, numpy
def most():
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) >> 10
array = numpy.ones(100 << 17)
for fn, args in ((len, (array,)), (functools.partial(numpy.ones, 100 << 17), ())):
    before = most()
    values = list(mpwatch.run(fn, 2, args=args))
    print(most() - before)
"""


def test_neither_arguments_nor_results_pass_through_the_watcher_s_heap():
    """100 MB each."""
    arguments, results = map(int, python("-c", MEMORY).stdout.split())
    assert arguments < 20
    assert results < 20


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nothing", "Too many open files"),
        ("a pipe", "could not receive its return value"),
        ("an empty file", "not a bundle"),
        ("a file of something else", "not a bundle"),
        ("a truncated file", "not a bundle"),
    ],
)
def test_an_invalid_file_instead_of_a_value(what, text):
    """A rank that writes to mpwatch's channel harms only itself."""
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(payload_functions.answers_with_invalid_files, 1, args=(what,))
    root = caught.value.root_cause
    assert root.kind is mpwatch.FailureKind.EXCEPTION
    assert text in str(root.exception)


def test_more_files_than_messages():
    with pytest.raises(mpwatch.RunFailedError, match="rank 0 ended without returning a result"):
        mpwatch.run(payload_functions.answers_with_invalid_files, 1, args=("two pipes",))


def test_a_rank_without_its_channel_leaves_a_small_value_in_the_black_box():
    came = mpwatch.run(payload_functions.closes_descriptors_and_returns, 1, args=(np.arange(float(MANY)),))[0]
    assert came[-1] == MANY - 1
    came[:] = 0


def test_a_module_registered_for_pickling_by_value_is_pickled_by_value():
    def as_called(fn):
        packed = call_payload.pack(call_payload.Call(fn, (), {}, None))
        try:
            return call_payload.unpack(packed.body, [os.dup(fd) for fd in packed.fds], len).fn
        finally:
            packed.close()

    assert as_called(functions.rank) is functions.rank
    cloudpickle.register_pickle_by_value(functions)
    try:
        assert as_called(functions.rank) is not functions.rank
    finally:
        cloudpickle.unregister_pickle_by_value(functions)


def test_objects_of_main_are_sent_by_value_even_if_the_function_is_not():
    printed = python(
        "-c",
        "import mpwatch\nclass Thing: pass\nresult = mpwatch.run(type, 1, args=(Thing(),))\nprint(result[0] is Thing)\n",
    ).stdout
    assert printed == "True\n"


def test_plain_pickler_calls_no_repr():
    class Shy:
        __module__ = "__main__"

        def __repr__(self):
            raise AssertionError("repr was called")

    with pytest.raises(pickle.PicklingError, match="of __main__"):
        PlainPickler(NullBundle()).dump(Shy())
