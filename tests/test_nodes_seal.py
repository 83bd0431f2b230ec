"""What nodes tell one another: it comes back as it was, or not at all."""

import functools
import hashlib
import hmac
import itertools
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwatch.elastic.talk import seal
from mpwatch.elastic.talk.seal import MAX_ENTRY, ForgedError, Seal, SecretError

PLACE = "round-7/attempt-1/inbox/3/12"
SIGNED = Seal(b"secret", "job")
PLAIN = Seal(b"", "job")
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
    with pytest.raises(ForgedError):
        SIGNED.open(PLACE, bytes(entry))


@given(body=BODIES, data=st.data())
def test_what_was_cut_off_is_found_even_without_a_secret(body, data):
    entry = PLAIN.close(PLACE, body).encode()
    with pytest.raises(ForgedError):
        PLAIN.open(PLACE, entry[: data.draw(st.integers(0, len(entry) - 1))])


@given(
    data=st.binary() | BODIES.map(lambda body: unsigned(json.dumps(body))) | st.text('[]{}",:\\u0d8 e1-.\n').map(unsigned)
)
def test_garbage_is_dropped_or_is_data(data):
    try:
        body = PLAIN.open(PLACE, data)
    except ForgedError:
        return
    assert PLAIN.close(PLACE, body).encode() == data


def test_an_entry_is_for_one_place_of_one_job():
    entry = SIGNED.close(PLACE, {"kind": "stop"}).encode()
    assert SIGNED.open(PLACE, entry) == {"kind": "stop"}
    for other, place in ((SIGNED, "round-7/attempt-2/inbox/3/12"), (Seal(b"secret", "other"), PLACE)):
        with pytest.raises(ForgedError, match="copied from another place or job"):
            other.open(place, entry)


def test_nothing_passes_from_the_job_into_the_place():
    entry = Seal(b"secret", "job").close("b/x", {}).encode()
    with pytest.raises(ForgedError, match="does not match"):
        Seal(b"secret", "jobb").open("/x", entry)


@pytest.mark.parametrize(
    ("maker", "reader", "why"),
    [
        (SIGNED, PLAIN, "^signed, and this node has no secret"),
        (PLAIN, SIGNED, "^not signed, while this node has a secret"),
        (SIGNED, Seal(b"other", "job"), "^signed with another secret"),
    ],
    ids=["none here", "none there", "another"],
)
def test_whose_secrets_differ_learns_it(maker, reader, why):
    with pytest.raises(SecretError, match=why):
        reader.open(PLACE, maker.close(PLACE, {}).encode())


def test_who_has_no_secret_cannot_sign():
    body = b'{"kind":"stop"}'
    honest = SIGNED.close(PLACE, {}).encode()
    guess = hmac.digest(b"", body, hashlib.sha256).hex().encode()
    with pytest.raises(ForgedError, match="does not match") as caught:
        SIGNED.open(PLACE, honest[:8] + b" " + guess + b"\n" + body)
    assert not isinstance(caught.value, SecretError)


BOMBS = {
    "not JSON: ": "{",
    "not UTF-8": b'{"a":"\xff"}',
    "more than 32 lists": "[" * 100_000,
    "more than 32 lists and mappings": '{"a":' * 40 + "1" + "}" * 40,
    "an integer of 5000 digits": '{"a":%s}' % ("9" * 5000),
    "an integer of 20 digits": '{"a":-%s}' % ("9" * 20),
    "JSON as mpwatch writes it": '{"a":1,"a":2}',
    "JSON as mpwatch writes it: .*ud800": '{"a":"\\ud800"}',
    "not a mapping": "[]",
    "out of range float": '{"a":NaN}',
    "out of range float.*Inf": '{"a":-Infinity}',
    "out of range float.*1e999": '{"a":1e999}',
    "JSON as mpwatch writes it.* ": '{"a": 1}',
}


@pytest.mark.parametrize(("why", "text"), BOMBS.items(), ids=range(len(BOMBS)))
def test_only_plain_small_json_is_read(why, text):
    with pytest.raises(ForgedError, match=f"(?i){why}") as caught:
        PLAIN.open(PLACE, unsigned(text))
    assert len(str(caught.value)) < 400


def test_depth_is_ours_not_the_interpreters():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)  # as some programs do: json alone would now run out of the stack, and crash
    try:
        with pytest.raises(ForgedError, match="more than 32"):
            PLAIN.open(PLACE, unsigned("[" * (MAX_ENTRY - 1)))
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    "text", ['"\\"' * 80_000, '"' + "\\" * 200_001, '{"a":"' + "[" * 200_000], ids=["quotes", "slashes", "open"]
)
def test_strings_without_end_take_no_time(text):
    with pytest.raises(ForgedError, match="not JSON"):
        PLAIN.open(PLACE, unsigned(text))


def test_brackets_in_texts_are_no_depth():
    body = {"a": '[{"' * 100 + "\\"}
    assert PLAIN.open(PLACE, PLAIN.close(PLACE, body).encode()) == body


@pytest.mark.parametrize("of_job", [SIGNED, PLAIN], ids=["signed", "plain"])
def test_the_limit_is_the_same_on_both_sides(of_job):
    room = 1000 - len(of_job.close(PLACE, {"a": ""}))
    entry = of_job.close(PLACE, {"a": "x" * room}, limit=1000)
    assert len(entry) == 1000
    assert of_job.open(PLACE, entry.encode(), limit=1000)
    with pytest.raises(ForgedError, match=r"^1000 bytes, more than the 999 bytes of an entry$"):
        of_job.open(PLACE, entry.encode(), limit=999)
    with pytest.raises(
        ValueError, match=r"inbox/3/12' cannot be sent: it is 1001 bytes, more than the 1000 bytes"
    ) as caught:
        of_job.close(PLACE, {"a": "x" * (room + 1)}, limit=1000)
    assert not isinstance(caught.value, ForgedError)


def test_too_large_is_not_even_looked_at():
    with pytest.raises(ForgedError, match=r"^3 MiB, more than the 256 KiB of an entry$"):
        SIGNED.open(PLACE, bytes(3 << 20))


@pytest.mark.parametrize("value", [float("nan"), 10**20, "\udc80", json.loads("[" * 40 + "]" * 40)], ids=range(4))
def test_nobody_sends_what_nobody_would_open(value):
    with pytest.raises(ValueError, match="cannot be sent"):
        PLAIN.close(PLACE, {"a": value})


@pytest.mark.parametrize(
    ("read", "value", "why"),
    [
        (seal.text, 3, "x must be a text, not 3"),
        (seal.text, "a" * 70_000, "x has 70000 characters, more than 65536"),
        (seal.text, "\x1b]0;gone\x07", r"x must be text without control characters, not '\\x1b"),
        (seal.text, "\udc80", "without control characters"),
        (seal.line, "a\nb", r"x must be one line, not 'a\\nb'"),
        (seal.count, True, "x must be a whole number from 0 to 2147483647, not True"),
        (seal.count, -1, "not -1"),
        (seal.count, 1.0, "not 1.0"),
        (seal.count, 10**5000, "not int too large to show"),
        (seal.count, functools.reduce(lambda inner, _: [inner], range(9999)), "not list too large to show"),
        (seal.number, float("nan"), "x must be a number from 0.0 to 1000000000000.0, not nan"),
        (seal.number, float("inf"), "not inf"),
        (seal.number, 10**5000, "too large to show"),
        (seal.number, "1", "not '1'"),
        (seal.flag, 1, "x must be true or false, not 1"),
        (lambda body, name: seal.items(body, name, limit=2), {}, "x must be a list"),
        (lambda body, name: seal.items(body, name, limit=2), [1, 2, 3], "x has 3 items, more than 2"),
        (lambda body, name: seal.mapping(body, name, limit=1), [], "x must be a mapping"),
        (lambda body, name: seal.mapping(body, name, limit=1), {1: 2}, "x must be a mapping"),
        (lambda body, name: seal.mapping(body, name, limit=1), {"a": 1, "b": 2}, "x has 2 entries, more than 1"),
        (lambda body, name: seal.choice(body, name, ["A", "B"]), "C", "x must be one of A, B, not 'C'"),
        (lambda body, name: seal.choice(body, name, ["A", "B"]), [], "x must be one of A, B"),
    ],
    ids=itertools.count(),
)
def test_readers_name_what_is_wrong(read, value, why):
    with pytest.raises(ForgedError, match=why) as caught:
        read({"x": value}, "x")
    assert len(str(caught.value)) < 200
    with pytest.raises(ForgedError, match="y is missing"):
        read({"x": value}, "y")


def test_readers_give_what_is_there():
    body = {
        "text": "a\n\tb\u00a0\u4e2d",
        "count": 3,
        "number": 2,
        "flag": False,
        "list": [1],
        "map": {"a": 1},
        "none": None,
        "kind": "A",
    }
    assert seal.text(body, "text") == body["text"]
    assert seal.count(body, "count", at_least=3, at_most=3) == 3
    assert isinstance(seal.number(body, "number"), float)
    assert seal.flag(body, "flag") is False
    assert seal.items(body, "list", limit=1) == [1]
    assert seal.mapping(body, "map", limit=1) == {"a": 1}
    assert seal.choice(body, "kind", ["A", "B"]) == "A"
    assert [seal.is_given(body, name) for name in ("none", "flag")] == [False, True]


@given(st.text(st.characters(categories=None)))
def test_any_text_can_be_made_readable(raw):
    made = seal.without_controls(raw)
    assert seal.text({"x": made}, "x") == made
    made.encode()


def test_colours_go_and_commands_show():
    assert seal.without_controls("\x1b[1;31mError\x1b[0m\r\n\x1b[2Jend\x85\udc80") == "Error\\r\n\\x1b[2Jend\\x85\\udc80"


@pytest.mark.parametrize(
    ("size", "shown"),
    [(17, "17 bytes"), (1 << 18, "256 KiB"), ((1 << 18) + 1, "256.1 KiB"), (3 << 20, "3 MiB"), (5 << 30, "5,120 MiB")],
)
def test_sizes_for_people(size, shown):
    assert seal.size_text(size) == shown
