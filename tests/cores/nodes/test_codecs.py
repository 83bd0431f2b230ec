"""What nodes send to one another: it arrives as it was sent, and anything else is refused with a reason."""

import dataclasses
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores.nodes.samples import make_sample
from mpwatch.nodes.frames import FIRST_BYTES, ForeignProgramError, Framing, SecretMismatchError
from mpwatch.nodes.json_codec import InvalidMessageError
from mpwatch.nodes.messages import MESSAGE_TYPES, NodeInfo, decode_message, encode_message

NODE_INFO = NodeInfo("job", "host", "10.0.0.1", 29500, 8, "trainer", None, False, 10.0, 600.0, None, {"nnodes": "2"})
WHOLE = st.integers(-(10**19) + 1, 10**19 - 1)
LEAVES = st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))
BODIES = st.binary(max_size=100)


def change(message, **fields):
    """Return the encoded message with other values of these fields."""
    return json.dumps(json.loads(encode_message(message)) | fields).encode()


# --- messages


@pytest.mark.parametrize("kind", [*MESSAGE_TYPES.values()], ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_arrives(kind):
    message = make_sample(kind)
    assert decode_message(encode_message(message)) == message


@given(st.text(st.characters(categories=None)))
def test_a_message_with_any_text_arrives(hostname):
    """The other nodes would wait for a message that they had to refuse."""
    arrived = decode_message(encode_message(dataclasses.replace(NODE_INFO, hostname=hostname)))
    assert type(arrived) is NodeInfo
    assert arrived.hostname == hostname or not hostname.isprintable()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": "Shutdown"}, "it is no message of mpwatch"),
        ({"nprocs": "8"}, r"NodeInfo\.nprocs must be int, not '8'"),
        ({"grace_period": float("nan")}, r"NodeInfo\.grace_period must be float, not nan"),
        ({"grace_period": 10**400}, "NodeInfo has a number that is too large"),
        ({"options": {"nnodes": 2}}, r"NodeInfo\.options\['nnodes'\] must be str, not 2"),
        ({"more": 1}, "NodeInfo has no field 'more'"),
    ],
)
def test_the_bad_field_of_a_message_is_named(fields, text):
    with pytest.raises(InvalidMessageError, match=text) as caught:
        decode_message(change(NODE_INFO, **fields))
    assert len(str(caught.value)) < 300


def test_no_text_of_another_node_controls_a_terminal():
    """See also results/texts.py."""
    arrived = decode_message(change(NODE_INFO, hostname="\x1b[2J", options={"\x9b": "\x9b"}))
    assert (arrived.hostname, arrived.options) == (r"\x1b[2J", {r"\x9b": r"\x9b"})


@given(st.sampled_from(list(MESSAGE_TYPES.values())), st.data())
def test_a_message_with_a_changed_field_is_refused_or_is_another_message(kind, data):
    message = make_sample(kind)
    name = data.draw(st.sampled_from(["kind", *(field.name for field in dataclasses.fields(kind))]))
    with suppress(InvalidMessageError):
        assert type(decode_message(change(message, **{name: data.draw(JSON)}))) in MESSAGE_TYPES.values()


# --- frames


def connect(secret=b"secret"):
    """Return both ends of a connection, after their greetings."""
    server, node = Framing(secret, is_server=True), Framing(secret, is_server=False)
    assert [*node.feed(server.greeting), *server.feed(node.greeting)] == []
    return server, node


@pytest.mark.parametrize("secret", [b"secret", b""], ids=["signed", "unsigned"])
@given(bodies=st.lists(BODIES, max_size=4), size=st.integers(1, 50))
def test_bodies_arrive_in_pieces_of_any_size(secret, bodies, size):
    server, node = connect(secret)
    data = b"".join(map(node.encode, bodies))
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert [body for piece in pieces for body in server.feed(piece)] == bodies


@given(body=BODIES, data=st.data())
def test_a_changed_bit_is_detected(body, data):
    server, node = connect()
    frame = bytearray(node.encode(body))
    frame[data.draw(st.integers(4, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(InvalidMessageError, match="wrongly signed"):
        list(server.feed(bytes(frame)))


def test_a_frame_is_accepted_once_by_one_end_of_one_connection():
    """A stranger may repeat what a node has sent, bit by bit."""
    server, node = connect()
    frame = node.encode(b"stop")
    assert list(server.feed(frame)) == [b"stop"]
    for reader in (server, node, *connect()):
        with pytest.raises(InvalidMessageError, match="wrongly signed"):
            list(reader.feed(frame))


@pytest.mark.parametrize(
    ("own", "other", "why"),
    [
        (b"", b"secret", "^signed, but this node has no secret"),
        (b"secret", b"", "^not signed, but this node has a secret"),
        (b"secret", b"other", "^signed with another secret"),
    ],
)
def test_each_end_says_how_the_secrets_differ(own, other, why):
    with pytest.raises(SecretMismatchError, match=why):
        list(Framing(own, is_server=False).feed(Framing(other, is_server=True).greeting))


@given(st.binary(min_size=1))
def test_garbage_is_refused(data):
    with suppress(InvalidMessageError):
        assert list(Framing(b"", is_server=True).feed(data)) == []
    server, _ = connect(b"")
    with suppress(InvalidMessageError):
        assert all(decode_message(body) for body in server.feed(data))


def test_another_program_is_told_from_mpwatch():
    with pytest.raises(ForeignProgramError, match="HTTP"):
        list(Framing(b"", is_server=False).feed(b"HTTP/1.1 400 Bad Request"))


def test_the_first_message_of_a_stranger_is_small():
    server, _ = connect(b"")
    with pytest.raises(InvalidMessageError, match="too large"):
        list(server.feed((FIRST_BYTES + 1).to_bytes(4, "big")))
