"""A collective in words."""

import pytest

from mpwatch import Collective, CollectiveState


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
