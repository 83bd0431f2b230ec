"""Nothing is left in /dev/shm when workers, such as those of a DataLoader, are killed while they share a tensor.

Each test has its own /dev/shm: other tests check that nothing is left there.
"""

import ast
import signal
import subprocess

import pytest

from support.programs import ENV, call
from support.thoroughness import choose
from with_torch import killed_workers

IN_NAMESPACE = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs mpwatch-test /dev/shm && exec "$@"', "sh")


def call_with_own_shared_memory(function, *args):
    """Return what this function prints."""
    try:
        subprocess.run([*IN_NAMESPACE, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot create a mount namespace: {error}")
    return ast.literal_eval(call(function, *args, within=IN_NAMESPACE, env={**ENV, "PYTHONWARNINGS": "ignore"}).stdout)


@pytest.mark.parametrize("count", [3, pytest.param(choose(60, 200), marks=pytest.mark.slow)])
def test_files_of_killed_workers_are_removed_if_the_rank_survives(count):
    assert call_with_own_shared_memory(killed_workers.watch, "load_batches", count) == (count, [])


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_files_of_workers_of_every_start_method_are_removed(context):
    assert call_with_own_shared_memory(killed_workers.watch, "load_batches", 2, context) == (2, [])


def test_files_are_removed_if_the_rank_fails_because_of_the_worker():
    outcome, left = call_with_own_shared_memory(killed_workers.watch, "load_batch")
    assert "RuntimeError: DataLoader worker (pid" in outcome
    assert not left


def test_files_are_removed_if_the_rank_is_killed_before_it_reaps_the_worker():
    outcome, left = call_with_own_shared_memory(killed_workers.watch, "die_after_worker")
    assert "SIGKILL" in outcome
    assert not left


@pytest.mark.slow
def test_the_file_of_a_rank_that_is_killed_while_it_shares_is_removed():
    outcome, left = call_with_own_shared_memory(killed_workers.watch, "die_while_sharing")
    assert "SIGXFSZ" in outcome
    assert not left


@pytest.mark.slow
def test_files_are_removed_before_ranks_are_restarted():
    assert call_with_own_shared_memory(killed_workers.watch_restart) == ([], [])


def test_the_file_of_a_program_in_the_group_of_the_rank_is_removed():
    assert call_with_own_shared_memory(killed_workers.watch, "start_program") == (1, [])


def test_files_of_other_programs_stay():
    made, left = call_with_own_shared_memory(killed_workers.watch_with_other_programs)
    assert len(made) == 2
    assert left == made


@pytest.mark.slow
def test_torch_removes_the_files_of_a_process_that_shares_by_name():
    """If this fails, the strategy file_system of torch has changed: see torch_files.py."""
    assert call_with_own_shared_memory(killed_workers.wait_for_torch) == (-signal.SIGXFSZ, 1)
