"""Tensors in shared memory, and shortages of it. Each test has its own /dev/shm: other tests check that nothing is left there."""

import subprocess

import pytest

from support.programs import ENV, call
from with_torch import shared_memory_programs as programs


def call_with_own_shared_memory(function, *args, size="1g"):
    """Return what this function prints."""
    mount = f'mount -t tmpfs -o size={size} mpwatch-test /dev/shm && exec "$@"'
    command = ("unshare", "--mount", "sh", "-c", mount, "sh")
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot create a mount namespace: {error}")
    return call(function, *args, within=command, env={**ENV, "PYTHONWARNINGS": "ignore"}).stdout


@pytest.mark.slow
def test_full_shared_memory_does_no_harm_to_arguments_and_is_named_in_the_report():
    shared, plain, failed = call_with_own_shared_memory(programs.use_full_shared_memory, size="64k").splitlines()[:3]
    assert shared == "values [1000.0] 1000.0"
    assert plain == "values [262144.0, 262144.0]"
    assert failed.startswith("EXCEPTION rank 0 failed first: RuntimeError: unable to "), failed
    assert "No space left on device" in failed


@pytest.mark.slow
def test_a_shared_tensor_takes_descriptors():
    output = call(programs.pass_thirty_shared_tensors, env={**ENV, "PYTHONWARNINGS": "ignore"}).stdout
    enough, short = output.splitlines()
    assert enough == "values [30, 30]"
    assert short.startswith("LaunchError the call could not be packed: "), short
    assert "Too many open files" in short
