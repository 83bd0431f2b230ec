"""Trainers on several nodes, which one call starts by an engine. See nodes_of_trainers.py."""

import pytest

from support.programs import ENV, call
from trainers import nodes_of_trainers

pytestmark = pytest.mark.slow
ENVIRONMENT = {**ENV, "PYTHONWARNINGS": "ignore"}  # the trainers warn


def test_lightning_trains_on_two_nodes():
    assert call(nodes_of_trainers.fit, env=ENVIRONMENT).stdout.splitlines()[-1] == "2 True 4.0"


def test_accelerate_starts_ranks_on_two_nodes():
    assert call(nodes_of_trainers.launch, env=ENVIRONMENT).stdout.splitlines()[-1] == "0 of 2 1 of 2"
