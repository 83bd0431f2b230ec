"""PerRank: an argument of which each rank gets its own value."""

import threading
from types import MappingProxyType

import pytest

import mpwatch
from mpwatch import PerRank
from support import functions
from support.programs import python


def get_arguments(*args, **kwargs):
    return functions.rank(), args, kwargs


def test_each_rank_gets_its_own_value():
    result = mpwatch.run(
        get_arguments,
        2,
        args=(PerRank(range(2)), "all", PerRank("abc"[rank] for rank in range(2))),
        kwargs={"x": PerRank([7, 8])},
    )
    assert list(result) == [(rank, (rank, "all", "abc"[rank]), {"x": 7 + rank}) for rank in range(2)]


def test_calls_of_a_group():
    with mpwatch.WorkerGroup(2) as group:
        for number in range(2):
            result = group.run(functions.double, (PerRank([number, number + 10]),), {"plus": PerRank([0, 1])})
            assert list(result) == [2 * number, 2 * number + 21]
        with pytest.raises(ValueError, match=r"^kwargs\['plus'\] is a PerRank of 3 values, but there are 2 ranks$"):
            group.run(functions.double, (1,), {"plus": PerRank([1, 2, 3])})
        with pytest.raises(mpwatch.LaunchError, match=r"^args\[0\].values\[1\]\['lock'\] is a .*lock, which cannot be sent"):
            group.run(functions.double, (PerRank([1, {"lock": threading.Lock()}]),))
        assert list(group.run(functions.double, (1,))) == [2, 2]


def fail_once(value):
    if functions.rank() == 1 and mpwatch.current_worker().restart_count == 0:
        raise RuntimeError("first attempt")
    return value


def test_a_restarted_rank_gets_its_value_again():
    result = mpwatch.run(fail_once, 2, args=(PerRank(["a", "b"]),), max_restarts=1)
    assert (list(result), result.restarts) == (["a", "b"], 1)


PROGRAM = """
import mpwatch

class Config:
    pass

class Other:
    pass

def train(config, of_all):
    import __main__
    return type(of_all) is Config and type(config) is vars(__main__)[type(config).__name__]

print(list(mpwatch.run(train, 2, args=(mpwatch.PerRank([Config(), Other()]), Config()))))
"""


def test_classes_of_a_script():
    assert python("-c", PROGRAM).stdout == "[True, True]\n"


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ("ab", r"^PerRank needs one value for each rank, such as PerRank\(\[a, b\]\), not 'ab'$"),
        (MappingProxyType({}), "not mappingproxy"),
        (3, "not 3$"),
    ],
)
def test_bad_values(values, error):
    with pytest.raises(TypeError, match=error):
        PerRank(values)


@pytest.mark.parametrize("value", [[PerRank([1, 2])], PerRank([1, PerRank([1, 2])])])
def test_a_part_of_an_argument_is_refused(value):
    with pytest.raises(mpwatch.LaunchError, match=r"^args\[0\].* a PerRank must itself be one of args or kwargs"):
        mpwatch.run(functions.double, 2, args=(value,))
