"""Tensors in shared memory, on a host that is short of shared memory or of descriptors."""

import subprocess

import pytest

from support.programs import ENV, call
from with_torch import shared_memory_programs

QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}
SMALL = "mount -t tmpfs -o size=64k mpwatch-test /dev/shm && "


def call_in_small_shared_memory(function):
    """Return the lines that this function prints."""
    command = ("unshare", "--mount", "sh", "-c", SMALL + 'exec "$@"', "sh")
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot create a mount namespace: {error}")
    return call(function, within=command, env=QUIET).stdout.splitlines()


@pytest.mark.slow
def test_a_shared_tensor_needs_no_more_shared_memory():
    lines = call_in_small_shared_memory(shared_memory_programs.pass_tensors_while_shared_memory_is_full)
    assert lines == ["values [1000.0]", "1000.0", "values [262144.0, 262144.0]"]


@pytest.mark.slow
def test_the_report_says_that_shared_memory_is_full():
    output, *_ = call_in_small_shared_memory(shared_memory_programs.share_while_shared_memory_is_full)
    assert output.startswith("EXCEPTION rank 0 failed first: RuntimeError: unable to "), output
    assert "No space left on device" in output


@pytest.mark.slow
def test_a_shared_tensor_takes_descriptors():
    enough, short = call(shared_memory_programs.pass_thirty_shared_tensors, env=QUIET).stdout.splitlines()
    assert enough == "values [30, 30]"
    assert short.startswith("LaunchError the call could not be packed: "), short
    assert "Too many open files" in short
    assert "args[" not in short
