"""How a program with Lightning and a watched strategy ends after a failure of rank 1. Lightning's own: see benchmarks."""

import signal

import pytest

from benchmarks.lightning_failures import run_program
from support.programs import ENV

pytestmark = pytest.mark.slow

ENDS = {  # failure of rank 1: exit status of the program, what it prints
    "raises": (1, "\nrank 1 failed first: BadShardError: shard 1 has 17 columns, not 16"),
    "killed": (128 + signal.SIGKILL, "\nrank 1 was killed by SIGKILL"),
    "interrupted": (1, "\nCtrl-C works as before: True\n"),
}


@pytest.mark.parametrize("failure", ENDS)
def test_a_failure_of_rank_1_ends_the_program_at_once_and_is_reported(failure):
    status, text = ENDS[failure]
    end = run_program("watched", failure, ENV)
    assert end.status == status
    assert text in end.output
    assert failure == "interrupted" or end.raised < 25  # as long as rank 0 is busy
    assert end.left == []
    assert "Received SIGTERM" not in end.output  # Lightning's handler prints it
    if failure == "raises":
        assert "\nthe exception itself: True 17 explained by the strategy\n" in end.output
