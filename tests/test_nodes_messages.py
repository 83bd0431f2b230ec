"""What nodes tell one another, as data and back; and what is no message."""

import json
from contextlib import suppress
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import filled

from mpwatch.multinode.protocol.json_codec import from_json, to_json
from mpwatch.multinode.protocol.messages import (
    KINDS,
    AttemptDecision,
    AttemptReport,
    JobConfig,
    LostNode,
    NextStep,
    NodeInfo,
    NodeOutcome,
    PublishedTerms,
    RankAssignment,
    RefusedNode,
    RestartHistory,
    RoundName,
    ShutdownAck,
    StartAttempt,
    StopAttempt,
    from_body,
    to_body,
)
from mpwatch.multinode.protocol.signed_json import InvalidEntryError

ENTRIES = [PublishedTerms, RefusedNode, RoundName]
CARD = NodeInfo(
    1, "host", "10.0.0.1", 8, "trainer", False, 10.0, "n", JobConfig((("nnodes", "2"),)), RestartHistory(3, 1, 100, 0)
)
VERDICT = AttemptDecision(
    2, NextStep.RESTART, RestartHistory(3), 5, ({"rank": 5},), 1, (LostNode(1, "host", 8, 8, "silent"),), "why", delay=0.5
)
MESSAGES = [
    CARD,
    VERDICT,
    ShutdownAck(0),
    AttemptReport(1, 0, NodeOutcome.FAILED, ({"a": 1},)),
    StopAttempt(0, "why"),
    RankAssignment(1, 0, "n", 8, 0, 8),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message):
    assert from_body(json.loads(json.dumps(to_body(message)))) == message


@pytest.mark.parametrize("kind", [*KINDS.values(), *ENTRIES], ids=lambda kind: kind.__name__)
def test_no_field_is_lost(kind):
    message = filled(kind)
    assert from_json(kind, json.loads(json.dumps(to_json(message)))) == message
    if kind in KINDS.values():
        assert from_body(json.loads(json.dumps(to_body(message)))) == message


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "Shutdown"}, "no message of kind 'Shutdown'"),
        ({"kind": ["NodeInfo"]}, "no message of kind"),
        ({"nprocs": "8"}, r"NodeInfo\.nprocs must be a whole number"),
        ({"nprocs": True}, r"NodeInfo\.nprocs"),
        ({"nprocs": 1 << 60}, r"NodeInfo\.nprocs"),
        ({"grace_period": float("nan")}, r"NodeInfo\.grace_period must be a finite number"),
        ({"host": "\x1b[2J"}, r"NodeInfo\.host must be a text"),
        ({"host": "x" * 70_000}, r"NodeInfo\.host must be a text"),
        ({"terms": {"items": [["a"]]}}, r"NodeInfo\.terms\.items\[0\] must be 2 values"),
        ({"history": {"attempts": 1}}, r"NodeInfo\.history\.used is missing"),
        ({"more": 1}, "NodeInfo has no field 'more'"),
    ],
)
def test_what_is_wrong_with_a_message_is_named(change, text):
    with pytest.raises(InvalidEntryError, match=text):
        from_body(to_body(CARD) | change)


@given(st.text(), st.text())
def test_whatever_a_node_has_to_say_it_can_be_said(host, reason):
    """A message that the others had to drop would be missed by them."""
    for message in (replace(CARD, host=host), replace(VERDICT, reason=reason)):
        assert type(from_body(json.loads(json.dumps(to_body(message))))) is type(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda of: st.lists(of) | st.dictionaries(st.text(), of),
)


@given(st.sampled_from([*MESSAGES, StartAttempt(0, 8, 2, "a", 1, "h", 4)]), st.data())
def test_a_message_with_something_else_in_it_is_none_or_another(message, data):
    body = to_body(message)
    name = data.draw(st.sampled_from([field.name for field in fields(message)]))
    with suppress(InvalidEntryError):
        assert type(from_body(body | {name: data.draw(JSON)})) is type(message)
