"""Signed JSON: an entry is decoded to what was encoded, or it is refused."""

import hashlib
import hmac
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwatch.multinode.protocol import signed_json
from mpwatch.multinode.protocol.signed_json import InvalidEntryError, SecretMismatchError, SignedJson

NAME = "round-7/attempt-1/inbox/3/12"
SIGNED = SignedJson(b"secret", "job")
UNSIGNED = SignedJson(b"", "job")
WHOLE = st.integers(-(10**19) + 1, 10**19 - 1)
LEAVES = st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
BODIES = st.dictionaries(st.text(), VALUES, max_size=5)


def unsigned_entry(text):
    return b"\n" + (text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("codec", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
@given(body=BODIES)
def test_an_encoded_body_is_decoded(codec, body):
    assert codec.decode(NAME, codec.encode(NAME, body).encode()) == body


@given(body=BODIES, data=st.data())
def test_a_changed_bit_is_detected(body, data):
    entry = bytearray(SIGNED.encode(NAME, body).encode())
    entry[data.draw(st.integers(0, len(entry) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(InvalidEntryError):
        SIGNED.decode(NAME, bytes(entry))


@given(body=BODIES, data=st.data())
def test_a_cut_entry_is_detected_even_without_a_secret(body, data):
    entry = UNSIGNED.encode(NAME, body).encode()
    with pytest.raises(InvalidEntryError):
        UNSIGNED.decode(NAME, entry[: data.draw(st.integers(0, len(entry) - 1))])


@given(
    data=st.binary()
    | BODIES.map(lambda body: unsigned_entry(json.dumps(body)))
    | st.text('[]{}",:\\u0d8 e1-.\n').map(unsigned_entry)
)
def test_garbage_is_refused_or_is_a_mapping(data):
    try:
        assert isinstance(UNSIGNED.decode(NAME, data), dict)
    except InvalidEntryError:
        return


def test_an_entry_is_valid_for_one_name_of_one_job():
    entry = SIGNED.encode(NAME, {"kind": "stop"}).encode()
    assert SIGNED.decode(NAME, entry) == {"kind": "stop"}
    for other, name in ((SIGNED, "round-7/attempt-2/inbox/3/12"), (SignedJson(b"secret", "other"), NAME)):
        with pytest.raises(InvalidEntryError, match="copied from another name or job"):
            other.decode(name, entry)


def test_the_end_of_the_run_id_cannot_be_read_as_the_start_of_the_name():
    entry = SignedJson(b"secret", "job").encode("b/x", {}).encode()
    with pytest.raises(InvalidEntryError, match="wrongly signed"):
        SignedJson(b"secret", "jobb").decode("/x", entry)


@pytest.mark.parametrize(
    ("writer", "reader", "why"),
    [
        (SIGNED, UNSIGNED, "^signed, but this node has no secret"),
        (UNSIGNED, SIGNED, "^not signed, but this node has a secret"),
        (SIGNED, SignedJson(b"other", "job"), "^signed with another secret"),
    ],
    ids=["reader has none", "writer has none", "different"],
)
def test_different_secrets_are_reported(writer, reader, why):
    with pytest.raises(SecretMismatchError, match=why):
        reader.decode(NAME, writer.encode(NAME, {}).encode())


def test_a_valid_signature_needs_the_secret():
    body = b'{"kind":"stop"}'
    entry = SIGNED.encode(NAME, {}).encode()
    guess = hmac.digest(b"", body, hashlib.sha256).hex().encode()
    with pytest.raises(InvalidEntryError, match="wrongly signed") as caught:
        SIGNED.decode(NAME, entry[:8] + b" " + guess + b"\n" + body)
    assert not isinstance(caught.value, SecretMismatchError)


NOT_JSON = {
    "not JSON: ": "{",
    "not JSON: .*utf-8": b'{"a":"\xff"}',
    "not JSON: .*(recursion|Stack overflow)": "[" * 100_000,
    "not JSON: Exceeds the limit": '{"a":%s}' % ("9" * 5000),
    "not a mapping": "[]",
    "NaN is not a JSON number": '{"a":NaN}',
    "-Infinity is not a JSON number": '{"a":-Infinity}',
}


@pytest.mark.parametrize(("why", "text"), NOT_JSON.items(), ids=range(len(NOT_JSON)))
def test_only_a_json_mapping_is_decoded(why, text):
    with pytest.raises(InvalidEntryError, match=why) as caught:
        UNSIGNED.decode(NAME, unsigned_entry(text))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("codec", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_the_limit_is_the_same_on_both_sides(codec):
    room = 1000 - len(codec.encode(NAME, {"a": ""}))
    entry = codec.encode(NAME, {"a": "x" * room}, limit=1000)
    assert len(entry) == 1000
    assert codec.decode(NAME, entry.encode(), limit=1000)
    with pytest.raises(InvalidEntryError, match=r"^too large: 1000 bytes, more than the limit of 999 bytes$"):
        codec.decode(NAME, entry.encode(), limit=999)
    with pytest.raises(
        ValueError, match=r"inbox/3/12' cannot be sent: too large: 1001 bytes, more than the limit of 1000 bytes"
    ) as caught:
        codec.encode(NAME, {"a": "x" * (room + 1)}, limit=1000)
    assert not isinstance(caught.value, InvalidEntryError)


def test_the_size_is_checked_before_the_content():
    with pytest.raises(InvalidEntryError, match=r"^too large: 3 MiB, more than the limit of 256 KiB$"):
        SIGNED.decode(NAME, bytes(3 << 20))


@pytest.mark.parametrize("value", [float("nan"), "\udc80"], ids=range(2))
def test_data_that_cannot_be_json_is_not_sent(value):
    with pytest.raises(ValueError, match="cannot be sent"):
        UNSIGNED.encode(NAME, {"a": value})


@pytest.mark.parametrize(
    ("size", "shown"),
    [(17, "17 bytes"), (1 << 18, "256 KiB"), ((1 << 18) + 1, "256.1 KiB"), (3 << 20, "3 MiB"), (5 << 30, "5,120 MiB")],
)
def test_sizes_have_units(size, shown):
    assert signed_json.format_size(size) == shown
