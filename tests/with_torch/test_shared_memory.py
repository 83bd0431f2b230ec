"""Tensors in shared memory: what is left in /dev/shm when processes are killed while they share one, and shortages.

Each test has its own /dev/shm: other tests check that nothing is left there.
"""

import ast
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


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_files_of_killed_workers_are_removed_when_the_rank_has_returned(context):
    made, left = ast.literal_eval(call_with_own_shared_memory(programs.kill_workers, context))
    assert (made, left) == (2, [])


def test_files_are_removed_if_the_rank_is_killed_before_it_reaps_the_worker():
    outcome, left = ast.literal_eval(call_with_own_shared_memory(programs.kill_rank_and_worker))
    assert "SIGKILL" in outcome
    assert left == []


@pytest.mark.slow
def test_the_file_of_a_rank_that_is_killed_while_it_shares_is_removed_before_the_restart():
    assert ast.literal_eval(call_with_own_shared_memory(programs.restart_a_killed_rank)) == ([], [])


@pytest.mark.slow
def test_files_of_other_programs_stay():
    made, left = ast.literal_eval(call_with_own_shared_memory(programs.make_files_of_other_programs))
    assert len(made) == 2
    assert left == made


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
