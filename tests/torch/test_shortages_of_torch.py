"""Tensors in shared memory, where the host is short of shared memory or of descriptors."""

import subprocess

import pytest
from programs import python

IMPORTS = (
    "import os, sys, saboteurs, torch, torch.multiprocessing, witness\nfrom witness import attempt, leave_descriptors\n"
)
SMALL = "mount -t tmpfs -o size=64k mpwatch-test /dev/shm && "
FILL = """
def fill():
    with open("/dev/shm/full", "wb", 0) as file:
        try:
            while file.write(bytes(4096)): pass
        except OSError: pass
    return empty
def empty():  # torch leaves a file that it could not fill
    for name in os.listdir("/dev/shm"): os.unlink(f"/dev/shm/{name}")
def add(tensor):
    tensor += 1
    return float(tensor.sum())
def more(_):
    return torch.zeros(1 << 16).share_memory_()
"""


def in_small_shared_memory(program):
    within = ("unshare", "--mount", "sh", "-c", SMALL + 'exec "$@"', "sh")
    try:
        subprocess.run([*within, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mounts of its own can be made here: {error}")
    return python("-W", "ignore", "-c", IMPORTS + FILL + program, within=within).stdout.splitlines()


def test_a_shared_tensor_needs_no_more_shared_memory():
    program = (
        "shared, plain = torch.zeros(1000).share_memory_(), torch.zeros(1 << 18)\n"
        "print(attempt(add, 1, args=(shared,), short=fill))\n"
        "print(float(shared.sum()))\n"
        "print(attempt(add, args=(plain,), short=fill))\n"
    )
    assert in_small_shared_memory(program) == ["values [1000.0]", "1000.0", "values [262144.0, 262144.0]"]


def test_a_rank_that_finds_shared_memory_full_says_so():
    said, *_ = in_small_shared_memory("print(attempt(more, 1, args=(None,), short=fill))\n")
    assert said.startswith("EXCEPTION rank 0 failed first: RuntimeError: unable to "), said
    assert "No space left on device" in said


def test_a_shared_tensor_takes_descriptors():
    program = (
        "tensors = [torch.zeros(1).share_memory_() for _ in range(30)]\n"
        "print(attempt(len, args=(tensors,)))\n"
        "print(attempt(len, args=(tensors,), short=lambda: leave_descriptors(20)))\n"
    )
    fine, short = python("-W", "ignore", "-c", IMPORTS + program).stdout.splitlines()
    assert fine == "values [30, 30]"
    assert short.startswith("LaunchError the call could not be packed: "), short
    assert "Too many open files" in short
    assert "args[" not in short
