"""Send an object within one process, as an argument and as a return value, and see which memory is mapped."""

import os
from pathlib import Path

import pytest

from mpwatch.wire.pickling import call_payload, return_values
from mpwatch.wire.pickling.pickle_buffers import map_bundle


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


both_ways = pytest.mark.parametrize("sent", [send_as_argument, send_as_value])


def list_mappings():
    """Return the address ranges of mapped bundles in this process."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:mpwatch-" in line]
    return [range(*(int(end, 16) for end in line.split()[0].split("-"))) for line in lines]
