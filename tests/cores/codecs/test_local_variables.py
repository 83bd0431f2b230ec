"""The texts of local variables, which a rank makes for `debug="locals"`: bounded in size, in number and in time."""

from collections import defaultdict

import pytest

from mpwatch.wire.exceptions import local_variables
from mpwatch.wire.exceptions.local_variables import MAX_TEXT, MAX_VARIABLES, STOPPED, format_local_variables

FIRST_20 = ", ".join(map(str, range(20)))


class Raises:
    def __repr__(self):
        raise SystemExit(3)


def texts_of(function, *args):
    with pytest.raises(ZeroDivisionError) as caught:
        function(*args)
    (frames,) = format_local_variables([caught.value.__traceback__.tb_next])
    return frames[0]


def divide(value):
    return 1 / 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Raises(), "<its repr raised SystemExit>"),
        (b"x" * 100_000_000, f"b'{'x' * 246}...{'x' * 248}'"),
        ("x" * 100_000_000, f"'{'x' * 247}...{'x' * 248}'"),
        (dict.fromkeys(range(1_000_000)), f"{{{FIRST_20.replace(',', ': None,')}: None, ...}}"),
        (set(range(1_000_000)), f"{{{FIRST_20}, ...}}"),
        (defaultdict(int, {1: 2}), "defaultdict(<class 'int'>, {1: 2})"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_the_beginning_of_a_large_value_is_read(value, text, monkeypatch):
    monkeypatch.setattr(local_variables, "LIMIT_SECONDS", 60.0)
    assert texts_of(divide, value)["value"] == text


def test_what_takes_too_long_is_left_out(monkeypatch):
    monkeypatch.setattr(local_variables, "LIMIT_SECONDS", 0)
    assert set(texts_of(divide, 7).values()) == {STOPPED}


def test_texts_and_variables_are_bounded():
    names = "=".join(f"v{number}" for number in range(500))
    exec(f"def many():\n  {names} = 1\n  return 1 / 0", space := {})
    assert len(texts_of(divide, ["x" * 400] * 20)["value"]) <= MAX_TEXT
    assert len(texts_of(space["many"])) == MAX_VARIABLES
