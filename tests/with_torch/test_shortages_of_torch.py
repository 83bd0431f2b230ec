"""Tensors in shared memory, on a host that is short of shared memory or of descriptors."""

import subprocess

import pytest

from support.programs import python

IMPORTS = (
    "import os, sys, torch, torch.multiprocessing\n"
    "from support import failing, one_run\n"
    "from support.one_run import attempt, leave_descriptors\n"
)
SMALL = "mount -t tmpfs -o size=64k mpwatch-test /dev/shm && "
FILL = """
def fill():
    with open("/dev/shm/full", "wb", 0) as file:
        try:
            while file.write(bytes(4096)): pass
        except OSError: pass
    return empty
def empty():  # torch does not delete a file that it could not fill
    for name in os.listdir("/dev/shm"): os.unlink(f"/dev/shm/{name}")
def add(tensor):
    tensor += 1
    return float(tensor.sum())
def share_another_tensor(_):
    return torch.zeros(1 << 16).share_memory_()
"""


def run_in_small_shared_memory(program):
    command = ("unshare", "--mount", "sh", "-c", SMALL + 'exec "$@"', "sh")
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot create a mount namespace: {error}")
    return python("-W", "ignore", "-c", IMPORTS + FILL + program, within=command).stdout.splitlines()


@pytest.mark.slow
def test_a_shared_tensor_needs_no_more_shared_memory():
    program = (
        "shared, plain = torch.zeros(1000).share_memory_(), torch.zeros(1 << 18)\n"
        "print(attempt(add, 1, args=(shared,), short=fill))\n"
        "print(float(shared.sum()))\n"
        "print(attempt(add, args=(plain,), short=fill))\n"
    )
    assert run_in_small_shared_memory(program) == ["values [1000.0]", "1000.0", "values [262144.0, 262144.0]"]


def test_the_report_says_that_shared_memory_is_full():
    output, *_ = run_in_small_shared_memory("print(attempt(share_another_tensor, 1, args=(None,), short=fill))\n")
    assert output.startswith("EXCEPTION rank 0 failed first: RuntimeError: unable to "), output
    assert "No space left on device" in output


@pytest.mark.slow
def test_a_shared_tensor_takes_descriptors():
    program = (
        "tensors = [torch.zeros(1).share_memory_() for _ in range(30)]\n"
        "print(attempt(len, args=(tensors,)))\n"
        "print(attempt(len, args=(tensors,), short=lambda: leave_descriptors(20)))\n"
    )
    enough, short = python("-W", "ignore", "-c", IMPORTS + program).stdout.splitlines()
    assert enough == "values [30, 30]"
    assert short.startswith("LaunchError the call could not be packed: "), short
    assert "Too many open files" in short
    assert "args[" not in short
