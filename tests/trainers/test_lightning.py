"""Lightning's Trainer with a watched strategy, where users run it. See also test_lightning_results.py."""

import json

import pytest

from support.programs import ENV, call
from trainers import trainer_programs as programs

pytestmark = pytest.mark.slow
QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}  # Lightning uses what torch has deprecated


def test_lightning_trains_on_two_nodes():
    done = call(programs.fit_on_two_nodes, env=QUIET)
    assert json.loads(done.stdout.splitlines()[-1]) == [2, True, {"world_size": 4.0, "node_rank": 2.0}]


def test_lightning_saves_and_stops_on_all_ranks(tmp_path):
    done = call(programs.fit_until_stop, str(tmp_path / "last.ckpt"), cwd=tmp_path, env=QUIET)
    step, saved_step, was_stopped = json.loads(done.stdout.splitlines()[-1])
    assert 3 < step == saved_step < 4000
    assert was_stopped
