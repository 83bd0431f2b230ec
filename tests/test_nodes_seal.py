"""What nodes tell one another: it comes back as it was, or not at all."""

import hashlib
import hmac
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwatch.multinode.protocol import signed_json
from mpwatch.multinode.protocol.signed_json import InvalidEntryError, SecretMismatchError, SignedJson

PLACE = "round-7/attempt-1/inbox/3/12"
SIGNED = SignedJson(b"secret", "job")
PLAIN = SignedJson(b"", "job")
WHOLE = st.integers(-(10**19) + 1, 10**19 - 1)
LEAVES = st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
BODIES = st.dictionaries(st.text(), VALUES, max_size=5)


def unsigned(text):
    return b"\n" + (text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("of_job", [SIGNED, PLAIN], ids=["signed", "plain"])
@given(body=BODIES)
def test_what_is_closed_opens(of_job, body):
    assert of_job.open(PLACE, of_job.close(PLACE, body).encode()) == body


@given(body=BODIES, data=st.data())
def test_a_changed_bit_is_found(body, data):
    entry = bytearray(SIGNED.close(PLACE, body).encode())
    entry[data.draw(st.integers(0, len(entry) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(InvalidEntryError):
        SIGNED.open(PLACE, bytes(entry))


@given(body=BODIES, data=st.data())
def test_what_was_cut_off_is_found_even_without_a_secret(body, data):
    entry = PLAIN.close(PLACE, body).encode()
    with pytest.raises(InvalidEntryError):
        PLAIN.open(PLACE, entry[: data.draw(st.integers(0, len(entry) - 1))])


@given(
    data=st.binary() | BODIES.map(lambda body: unsigned(json.dumps(body))) | st.text('[]{}",:\\u0d8 e1-.\n').map(unsigned)
)
def test_garbage_is_dropped_or_is_a_mapping(data):
    try:
        assert isinstance(PLAIN.open(PLACE, data), dict)
    except InvalidEntryError:
        return


def test_an_entry_is_for_one_place_of_one_job():
    entry = SIGNED.close(PLACE, {"kind": "stop"}).encode()
    assert SIGNED.open(PLACE, entry) == {"kind": "stop"}
    for other, place in ((SIGNED, "round-7/attempt-2/inbox/3/12"), (SignedJson(b"secret", "other"), PLACE)):
        with pytest.raises(InvalidEntryError, match="copied from another place or job"):
            other.open(place, entry)


def test_nothing_passes_from_the_job_into_the_place():
    entry = SignedJson(b"secret", "job").close("b/x", {}).encode()
    with pytest.raises(InvalidEntryError, match="does not match"):
        SignedJson(b"secret", "jobb").open("/x", entry)


@pytest.mark.parametrize(
    ("maker", "reader", "why"),
    [
        (SIGNED, PLAIN, "^signed, and this node has no secret"),
        (PLAIN, SIGNED, "^not signed, while this node has a secret"),
        (SIGNED, SignedJson(b"other", "job"), "^signed with another secret"),
    ],
    ids=["none here", "none there", "another"],
)
def test_whose_secrets_differ_learns_it(maker, reader, why):
    with pytest.raises(SecretMismatchError, match=why):
        reader.open(PLACE, maker.close(PLACE, {}).encode())


def test_who_has_no_secret_cannot_sign():
    body = b'{"kind":"stop"}'
    honest = SIGNED.close(PLACE, {}).encode()
    guess = hmac.digest(b"", body, hashlib.sha256).hex().encode()
    with pytest.raises(InvalidEntryError, match="does not match") as caught:
        SIGNED.open(PLACE, honest[:8] + b" " + guess + b"\n" + body)
    assert not isinstance(caught.value, SecretMismatchError)


NOT_JSON = {
    "not JSON: ": "{",
    "not JSON: .*utf-8": b'{"a":"\xff"}',
    "not JSON: .*recursion": "[" * 100_000,
    "not JSON: Exceeds the limit": '{"a":%s}' % ("9" * 5000),
    "not a mapping": "[]",
    "NaN is no JSON number": '{"a":NaN}',
    "-Infinity is no JSON number": '{"a":-Infinity}',
}


@pytest.mark.parametrize(("why", "text"), NOT_JSON.items(), ids=range(len(NOT_JSON)))
def test_only_a_mapping_in_json_is_read(why, text):
    with pytest.raises(InvalidEntryError, match=why) as caught:
        PLAIN.open(PLACE, unsigned(text))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("of_job", [SIGNED, PLAIN], ids=["signed", "plain"])
def test_the_limit_is_the_same_on_both_sides(of_job):
    room = 1000 - len(of_job.close(PLACE, {"a": ""}))
    entry = of_job.close(PLACE, {"a": "x" * room}, limit=1000)
    assert len(entry) == 1000
    assert of_job.open(PLACE, entry.encode(), limit=1000)
    with pytest.raises(InvalidEntryError, match=r"^1000 bytes, more than the 999 bytes of an entry$"):
        of_job.open(PLACE, entry.encode(), limit=999)
    with pytest.raises(
        ValueError, match=r"inbox/3/12' cannot be sent: it is 1001 bytes, more than the 1000 bytes"
    ) as caught:
        of_job.close(PLACE, {"a": "x" * (room + 1)}, limit=1000)
    assert not isinstance(caught.value, InvalidEntryError)


def test_too_large_is_not_even_looked_at():
    with pytest.raises(InvalidEntryError, match=r"^3 MiB, more than the 256 KiB of an entry$"):
        SIGNED.open(PLACE, bytes(3 << 20))


@pytest.mark.parametrize("value", [float("nan"), "\udc80"], ids=range(2))
def test_what_is_no_json_is_not_sent(value):
    with pytest.raises(ValueError, match="cannot be sent"):
        PLAIN.close(PLACE, {"a": value})


@pytest.mark.parametrize(
    ("size", "shown"),
    [(17, "17 bytes"), (1 << 18, "256 KiB"), ((1 << 18) + 1, "256.1 KiB"), (3 << 20, "3 MiB"), (5 << 30, "5,120 MiB")],
)
def test_sizes_for_people(size, shown):
    assert signed_json.size_text(size) == shown
