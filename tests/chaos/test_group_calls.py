"""Random calls of a WorkerGroup keep the promises: no hang, nothing left, true outcomes, the order of the queue.

The suite runs a few histories, and `tox run -e chaos` hundreds. MPWATCH_CHAOS_SEED is the first seed.
"""

import os

import pytest

from chaos.group_calls import make_history, run_history

SEED = int(os.environ.get("MPWATCH_CHAOS_SEED", "1"))
HISTORIES = int(os.environ.get("MPWATCH_CHAOS_HISTORIES", "5"))


@pytest.mark.parametrize("seed", range(SEED, SEED + HISTORIES))
def test_random_calls_of_a_group(seed):
    errors = run_history(make_history(seed))
    assert not errors, "\n".join(errors)
