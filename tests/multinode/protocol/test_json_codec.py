"""The JSON codec of nodes: decoded values equal the encoded ones, and a bad field is named with its path."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwatch.multinode.protocol.json_codec import MAX_INTEGER, MAX_TEXT, from_json, to_json
from mpwatch.multinode.protocol.signed_json import InvalidEntryError
from mpwatch.results.clean_text import clean_text
from multinode.protocol.samples import make_sample


class Color(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Inner:
    name: str
    pair: tuple[int, float]


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...]
    listed: list[int]
    by_rank: Mapping[int, Inner]
    by_name: Mapping[str, float]
    color: Color
    maybe: Inner | None
    number: int | float
    mode: Literal["fast", "slow"]
    data: Any


OUTER = Outer(
    inner=Inner("a", (1, 2.5)),
    many=(Inner("b", (-3, -4.0)),),
    listed=[1, 2],
    by_rank={0: Inner("c", (5, 6.0)), -7: Inner("d", (8, 9.0))},
    by_name={"x": 1.0},
    color=Color.BLUE,
    maybe=None,
    number=1.5,
    mode="slow",
    data={"a": [1, None, True, "text"]},
)


def through_json(value):
    return json.loads(json.dumps(to_json(value)))


def test_every_supported_type_survives_a_round_trip():
    assert from_json(Outer, through_json(OUTER)) == OUTER


def test_an_omitted_field_gets_its_default():
    @dataclass(frozen=True)
    class Defaulted:
        sent: int
        local: object = None

    data = to_json(Defaulted(3, object()), omit=["local"])
    assert data == {"sent": 3}
    assert from_json(Defaulted, data, omit=["local"]) == Defaulted(3)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"inner": 3}, "Outer.inner must be a mapping, not 3"),
        ({"inner": {"name": "a"}}, "Outer.inner.pair is missing"),
        ({"inner": {"name": "a", "pair": [1, 2], "more": 1}}, "Outer.inner has no field 'more'"),
        ({"many": [{"name": "a", "pair": [1]}]}, r"Outer.many\[0\].pair must be 2 values, not \[1\]"),
        ({"many": {}}, "Outer.many must be a list"),
        ({"listed": [1, True]}, r"Outer.listed\[1\] must be a whole number"),
        ({"by_rank": {"x": {}}}, r"the key of Outer.by_rank\['x'\] must be a whole number, not 'x'"),
        ({"by_name": {"\x1b": 1}}, "the key of Outer.by_name.* must be a text"),
        ({"by_name": {"x": "1"}}, r"Outer.by_name\['x'\] must be a finite number, not '1'"),
        ({"by_name": {"x": float("inf")}}, "must be a finite number, not inf"),
        ({"by_name": {"x": 10**5000}}, "not a int that is too large to show"),
        ({"color": "GREEN"}, "Outer.color must be one of RED, BLUE, not 'GREEN'"),
        ({"maybe": 1}, "Outer.maybe must be a mapping, not 1"),
        ({"number": "1"}, "Outer.number must be a finite number"),
        ({"mode": "idle"}, "Outer.mode must be one of 'fast', 'slow', not 'idle'"),
        ({"data": {"a": [float("nan")]}}, r"Outer.data\['a'\]\[0\] must be a finite number, not nan"),
        ({"data": MAX_INTEGER + 1}, "Outer.data must be a whole number"),
        ({"data": "\x1b[2J"}, "Outer.data must be a text .* without control characters"),
        ({"data": "x" * (MAX_TEXT + 1)}, "Outer.data must be a text of at most 65536 characters"),
        ({"data": functools.reduce(lambda inner, _: [inner], range(9999))}, "Outer is nested too deeply"),
    ],
)
def test_a_bad_field_is_named_with_its_path(change, why):
    with pytest.raises(InvalidEntryError, match=why) as caught:
        from_json(Outer, through_json(OUTER) | change)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("value", "error", "why"),
    [
        (Inner("a", (1 << 60, 0.0)), ValueError, r"Inner.pair\[0\] must be a finite number, as an integer within"),
        (Inner("a", (1, float("nan"))), ValueError, r"Inner.pair\[1\] must be a finite number"),
        (Inner({1, 2}, (1, 2.0)), TypeError, "Inner.name cannot be sent to other nodes: set has no JSON encoding"),
        (Inner({None: 1}, (1, 2.0)), TypeError, "Inner.name .* its keys must be str or int, not None"),
    ],
    ids=range(4),
)
def test_a_value_that_cannot_be_sent_is_named_with_its_path(value, error, why):
    with pytest.raises(error, match=why):
        to_json(value)


@given(st.text(st.characters(categories=None)))
def test_any_text_can_be_sent(raw):
    data = through_json(Inner(raw, (1, 2.0)))
    assert from_json(Inner, data).name == clean_text(raw)
    clean_text(raw).encode()


def test_a_long_text_is_cut():
    assert len(from_json(Inner, through_json(Inner("x" * 100_000, (1, 2.0)))).name) == MAX_TEXT


def test_colors_are_removed_and_control_characters_are_escaped():
    assert clean_text("\x1b[1;31mError\x1b[0m\r\n\x1b[2Jend\x85\udc80") == "Error\\r\n\\x1b[2Jend\\x85\\udc80"


def test_the_sample_of_a_dataclass_has_no_default():
    assert make_sample(Inner) == Inner("text \u4e2d", (7, 1.5))
