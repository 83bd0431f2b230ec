"""A collective in words."""

from dataclasses import replace

import pytest

from mpwatch import Collective, CollectiveState
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.observations import RankObservations


def collective(**fields):
    return Collective(
        **{
            "name": "all_reduce",
            "sequence": 3,
            "group": "default",
            "ranks": (0, 1),
            "state": CollectiveState.WAITING,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "all_reduce #3 (default group)"),
        ({"group": "1 (pair)", "place": "a.py:1 in f"}, "all_reduce #3 (group 1 (pair)) at a.py:1 in f"),
        ({"input_shapes": ((16, 4),), "input_dtypes": ("float32",)}, "all_reduce #3 (float32[16, 4], default group)"),
        ({"input_shapes": ((),), "input_dtypes": ("int64",)}, "all_reduce #3 (int64[], default group)"),
        ({"output_shapes": ((2,), (2,)), "output_dtypes": ("int8",) * 2}, "all_reduce #3 (2 x int8[2], default group)"),
        (
            {"input_shapes": ((2,), (3,), (4,)), "input_dtypes": ("int8",) * 3},
            "all_reduce #3 (int8[2] and 2 more, default group)",
        ),
    ],
)
def test_a_collective_in_words(fields, text):
    assert str(collective(**fields)) == text


def answer(*calls):
    return RankCollectives(collectives=calls)


def test_a_later_answer_counts_if_the_rank_has_called_more():
    observed = RankObservations(worker=None)
    second, third = collective(sequence=2), collective(sequence=3)
    waiting = answer(second, replace(third, place="train.py:3 in step"))
    observed.add_collectives(answer(second))
    observed.add_collectives(waiting)
    observed.add_collectives(answer(replace(third, state=CollectiveState.COMPLETED)))  # it has raised, and calls no other
    assert observed.collectives is waiting
    observed.add_collectives(answer(third, replace(third, group="1 (pair)")))
    assert observed.collectives is not waiting
