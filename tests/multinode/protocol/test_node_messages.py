"""Messages of nodes: a decoded message equals the encoded one, and invalid data is refused."""

import json
from contextlib import suppress
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwatch.multinode.protocol.json_codec import from_json, to_json
from mpwatch.multinode.protocol.messages import (
    MESSAGE_TYPES,
    AttemptDecision,
    AttemptReport,
    JobConfig,
    LostNode,
    NextStep,
    NodeInfo,
    NodeOutcome,
    PublishedJobConfig,
    RankAssignment,
    RefusedNode,
    RestartHistory,
    RoundName,
    ShutdownAck,
    StartAttempt,
    StopAttempt,
    decode_message,
    encode_message,
)
from mpwatch.multinode.protocol.signed_json import InvalidEntryError
from multinode.protocol.samples import make_sample

ENTRIES = [PublishedJobConfig, RefusedNode, RoundName]
NODE_INFO = NodeInfo(
    1, "host", "10.0.0.1", 8, "trainer", False, 10.0, JobConfig((("nnodes", "2"),)), RestartHistory(3, 1, 100, 0)
)
DECISION = AttemptDecision(
    2, NextStep.RESTART, RestartHistory(3), 5, ({"rank": 5},), 1, (LostNode(1, "host", 8, 8, "silent"),), "why", delay=0.5
)
MESSAGES = [
    NODE_INFO,
    DECISION,
    ShutdownAck(0),
    AttemptReport(1, 0, NodeOutcome.FAILED, ({"a": 1},)),
    StopAttempt(0, "why"),
    RankAssignment(1, 0, 8, 0, 8),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_a_round_trip(message):
    assert decode_message(json.loads(json.dumps(encode_message(message)))) == message


@pytest.mark.parametrize("kind", [*MESSAGE_TYPES.values(), *ENTRIES], ids=lambda kind: kind.__name__)
def test_every_field_survives_a_round_trip(kind):
    message = make_sample(kind)
    assert from_json(kind, json.loads(json.dumps(to_json(message)))) == message
    if kind in MESSAGE_TYPES.values():
        assert decode_message(json.loads(json.dumps(encode_message(message)))) == message


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "Shutdown"}, "no message of kind 'Shutdown'"),
        ({"kind": ["NodeInfo"]}, "no message of kind"),
        ({"nprocs": "8"}, r"NodeInfo\.nprocs must be a whole number"),
        ({"nprocs": True}, r"NodeInfo\.nprocs"),
        ({"nprocs": 1 << 60}, r"NodeInfo\.nprocs"),
        ({"grace_period": float("nan")}, r"NodeInfo\.grace_period must be a finite number"),
        ({"hostname": "\x1b[2J"}, r"NodeInfo\.hostname must be a text"),
        ({"hostname": "x" * 70_000}, r"NodeInfo\.hostname must be a text"),
        ({"job_config": {"items": [["a"]]}}, r"NodeInfo\.job_config\.items\[0\] must be 2 values"),
        ({"history": {"attempts": 1}}, r"NodeInfo\.history\.restarts_used is missing"),
        ({"more": 1}, "NodeInfo has no field 'more'"),
    ],
)
def test_the_bad_field_of_a_message_is_named(change, text):
    with pytest.raises(InvalidEntryError, match=text):
        decode_message(encode_message(NODE_INFO) | change)


@given(st.text(), st.text())
def test_a_message_with_any_text_can_be_sent(hostname, reason):
    """The other nodes would wait for a message that they had to refuse."""
    for message in (replace(NODE_INFO, hostname=hostname), replace(DECISION, reason=reason)):
        assert type(decode_message(json.loads(json.dumps(encode_message(message))))) is type(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda of: st.lists(of) | st.dictionaries(st.text(), of),
)


@given(st.sampled_from([*MESSAGES, StartAttempt(0, 8, 2, "a", 1, "h", 4)]), st.data())
def test_a_message_with_a_changed_field_is_refused_or_is_another_message(message, data):
    body = encode_message(message)
    name = data.draw(st.sampled_from([field.name for field in fields(message)]))
    with suppress(InvalidEntryError):
        assert type(decode_message(body | {name: data.draw(JSON)})) is type(message)
