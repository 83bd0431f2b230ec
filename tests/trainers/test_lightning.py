"""Lightning's Trainer with a watched strategy, where users run it. See also test_lightning_results.py."""

import json
import signal

import pytest

from benchmarks.lightning_failures import run_program
from support.programs import ENV, call
from trainers import trainer_programs as programs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(330)]  # the imports take a minute on a busy machine
QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}  # Lightning uses what torch has deprecated


def test_lightning_trains_on_two_nodes():
    done = call(programs.fit_on_two_nodes, env=QUIET, timeout=300)
    assert json.loads(done.stdout.splitlines()[-1]) == [2, True, {"world_size": 4.0, "node_rank": 2.0}]


def test_lightning_saves_and_stops_on_all_ranks(tmp_path):
    done = call(programs.fit_until_stop, str(tmp_path / "last.ckpt"), cwd=tmp_path, env=QUIET, timeout=300)
    step, saved_step, was_stopped = json.loads(done.stdout.splitlines()[-1])
    assert 3 < step == saved_step < 4000
    assert was_stopped


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
