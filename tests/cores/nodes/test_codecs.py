"""What nodes send to one another: it arrives as it was sent, and anything else is refused with a reason."""

import dataclasses
import hashlib
import hmac
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores.nodes.samples import make_sample
from mpwatch.multinode.protocol.json_codec import from_json, to_json
from mpwatch.multinode.protocol.messages import (
    MESSAGE_TYPES,
    JobConfig,
    NodeInfo,
    PublishedJobConfig,
    RefusedNode,
    RestartHistory,
    RoundName,
    decode_message,
    encode_message,
)
from mpwatch.multinode.protocol.signed_json import InvalidEntryError, SecretMismatchError, SignedJson

ENTRIES = [PublishedJobConfig, RefusedNode, RoundName]
NODE_INFO = NodeInfo(1, "host", "10.0.0.1", 8, "trainer", False, 10.0, JobConfig((("nnodes", "2"),)), RestartHistory(3, 1))
NAME = "round-7/inbox/3/12"
SIGNED, UNSIGNED = SignedJson(b"secret", "job"), SignedJson(b"", "job")
CODECS = pytest.mark.parametrize("codec", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
WHOLE = st.integers(-(10**19) + 1, 10**19 - 1)
LEAVES = st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))
BODIES = st.dictionaries(st.text(), JSON, max_size=5)


def through_json(data):
    return json.loads(json.dumps(data))


# --- messages


@pytest.mark.parametrize("kind", [*MESSAGE_TYPES.values(), *ENTRIES], ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_arrives(kind):
    message = make_sample(kind)
    assert from_json(kind, through_json(to_json(message))) == message
    if kind not in ENTRIES:
        assert decode_message(through_json(encode_message(message))) == message


@given(st.text(st.characters(categories=None)))
def test_a_message_with_any_text_arrives(hostname):
    """The other nodes would wait for a message that they had to refuse."""
    arrived = decode_message(through_json(encode_message(dataclasses.replace(NODE_INFO, hostname=hostname))))
    assert type(arrived) is NodeInfo
    assert arrived.hostname == hostname or not hostname.isprintable()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "Shutdown"}, "no message of kind 'Shutdown'"),
        ({"nprocs": "8"}, r"NodeInfo\.nprocs must be a whole number"),
        ({"grace_period": float("nan")}, r"NodeInfo\.grace_period must be a finite number"),
        ({"hostname": "\x1b[2J"}, r"NodeInfo\.hostname must be a text"),
        ({"history": {"attempts": 1}}, r"NodeInfo\.history\.restarts_used is missing"),
        ({"more": 1}, "NodeInfo has no field 'more'"),
    ],
)
def test_the_bad_field_of_a_message_is_named(change, text):
    with pytest.raises(InvalidEntryError, match=text) as caught:
        decode_message(encode_message(NODE_INFO) | change)
    assert len(str(caught.value)) < 300


@given(st.sampled_from(list(MESSAGE_TYPES.values())), st.data())
def test_a_message_with_a_changed_field_is_refused_or_is_another_message(kind, data):
    body = encode_message(make_sample(kind))
    name = data.draw(st.sampled_from(sorted(body)))
    with suppress(InvalidEntryError):
        assert type(decode_message(body | {name: data.draw(JSON)})) in MESSAGE_TYPES.values()


# --- signatures


@CODECS
@given(body=BODIES)
def test_a_body_arrives(codec, body):
    assert codec.decode(NAME, codec.encode(NAME, body).encode()) == body


@given(body=BODIES, data=st.data())
def test_a_changed_bit_is_detected(body, data):
    entry = bytearray(SIGNED.encode(NAME, body).encode())
    entry[data.draw(st.integers(0, len(entry) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(InvalidEntryError):
        SIGNED.decode(NAME, bytes(entry))


@given(st.binary() | st.text('[]{}",:\\u0d8 e1-.\n').map(lambda text: b"\n" + text.encode()))
def test_garbage_is_refused_or_is_a_mapping(data):
    with suppress(InvalidEntryError):
        assert isinstance(UNSIGNED.decode(NAME, data), dict)


@pytest.mark.parametrize(
    ("reader", "name", "error", "why"),
    [
        (UNSIGNED, NAME, SecretMismatchError, "^signed, but this node has no secret"),
        (SignedJson(b"other", "job"), NAME, SecretMismatchError, "^signed with another secret"),
        (SIGNED, "round-8/inbox/3/12", InvalidEntryError, "copied from another name or job"),
        (SignedJson(b"secret", "other"), NAME, InvalidEntryError, "copied from another name or job"),
        (SignedJson(b"secret", "jobr"), NAME[1:], InvalidEntryError, "wrongly signed"),
    ],
)
def test_a_signed_entry_is_valid_for_one_secret_one_job_and_one_name(reader, name, error, why):
    entry = SIGNED.encode(NAME, {"kind": "stop"}).encode()
    with pytest.raises(error, match=why):
        reader.decode(name, entry)


def test_a_valid_signature_needs_the_secret():
    body = b'{"kind":"stop"}'
    guess = hmac.digest(b"", body, hashlib.sha256).hex().encode()
    with pytest.raises(InvalidEntryError, match="wrongly signed"):
        SIGNED.decode(NAME, SIGNED.encode(NAME, {}).encode()[:8] + b" " + guess + b"\n" + body)
    with pytest.raises(SecretMismatchError, match=r"^not signed, but this node has a secret"):
        SIGNED.decode(NAME, UNSIGNED.encode(NAME, {}).encode())


@CODECS
def test_the_limit_is_the_same_on_both_sides(codec):
    room = 1000 - len(codec.encode(NAME, {"a": ""}))
    entry = codec.encode(NAME, {"a": "x" * room}, limit=1000)
    assert codec.decode(NAME, entry.encode(), limit=len(entry))
    with pytest.raises(InvalidEntryError, match=r"^too large: 1000 bytes, more than the limit of 999 bytes$"):
        codec.decode(NAME, entry.encode(), limit=999)
    with pytest.raises(ValueError, match=r"inbox/3/12' cannot be sent: too large: 1001 bytes"):
        codec.encode(NAME, {"a": "x" * (room + 1)}, limit=1000)
