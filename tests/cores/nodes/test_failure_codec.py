"""Failures that are sent to other nodes: every failure fits and arrives, and invalid data is refused without harm."""

import copy
import json
import os
import traceback
from contextlib import suppress
from dataclasses import fields
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores.nodes.samples import make_value
from mpwatch import FailureKind, ProcessFailure
from mpwatch.nodes.failure_codec import MAX_FAILURE_BYTES, decode_failure, encode_failure
from mpwatch.nodes.json_codec import InvalidMessageError, dump_json

SENT = {field.name for field in fields(ProcessFailure)} - {"exception"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["OOM", "ValueError", "eval"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
RAW = st.text(st.characters(categories=None))  # includes surrogates, and control characters of terminals
LONG = st.builds(lambda text, times: text * times, RAW, st.integers(0, 3000))


def make_failure(**values):
    known = {"rank": 3, "local_rank": 1, "pid": 77, "hostname": "node1", "kind": FailureKind.EXCEPTION, "exit_code": 1}
    return ProcessFailure(**known | values)


def raise_and_catch(error, cause=None):
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def through_json(failure):
    return json.loads(dump_json(encode_failure(failure)))


def send(error):
    """Return the exception as another node gets it."""
    return decode_failure(through_json(make_failure(exception=error))).exception


class OwnError(ValueError):
    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")


def make_error():
    """Return an exception with all that one can have. The first one in it has a class of its own, and a cause with a cause."""
    first = OwnError(7, why="deep")
    first.add_note("first\nsecond")
    first = raise_and_catch(first, raise_and_catch(KeyError("key"), raise_and_catch(OSError(2, "missing", "path"))))
    group = raise_and_catch(BaseExceptionGroup("some", [first, KeyboardInterrupt()]))
    group.__context__, group.__suppress_context__ = KeyError("while"), False
    return group


def test_every_field_of_a_failure_arrives():
    hints = get_type_hints(ProcessFailure)
    sent = make_failure(**{name: make_value(hints[name]) for name in SENT})
    back = decode_failure(through_json(sent))
    for field in fields(ProcessFailure):
        assert getattr(sent, field.name) != field.default or field.name == "exception"
        assert getattr(back, field.name) == getattr(sent, field.name)
    bare = make_failure(pid=None)
    assert decode_failure(through_json(bare)) == bare


def test_a_received_exception_is_caught_by_its_builtin_base_and_printed_as_on_the_sending_node():
    error = make_error()
    back = send(error)
    there = [line for line in traceback.format_exception(error) if "^" not in line]
    assert traceback.format_exception(back) == there
    first, second = back.exceptions
    assert type(first) is not OwnError
    assert (type(first).__qualname__, type(first).__module__) == ("OwnError", __name__)
    for each, base in ((first, ValueError), (first.__cause__.__cause__, FileNotFoundError), (second, KeyboardInterrupt)):
        assert isinstance(each, base)
    assert first.__notes__ == ["first\nsecond"]


def test_an_exception_that_resists_encoding_arrives():
    class Hostile(Exception):
        def __str__(self):
            raise SystemExit(3)

        def __reduce__(self):
            os._exit(3)

    back = send(raise_and_catch(Hostile("\udc80")))
    assert (type(back).__name__, str(back)) == ("Hostile", "<its __str__ raised SystemExit>")


def test_a_recursion_keeps_its_first_and_last_frames():
    def recurse():
        recurse()

    with pytest.raises(RecursionError) as caught:
        recurse()
    whole, kept = (traceback.extract_tb(error.__traceback__) for error in (caught.value, send(caught.value)))
    assert 10 < len(kept) < len(whole)
    assert [(kept[end].name, kept[end].lineno) for end in (0, -1)] == [
        (whole[end].name, whole[end].lineno) for end in (0, -1)
    ]


@given(
    texts=st.lists(LONG, min_size=8, max_size=8),
    messages=st.lists(LONG, max_size=3),
    numbers=st.tuples(st.integers(0, 1 << 40), st.integers(0, 255), st.floats(0, 1e9)),
)
def test_any_failure_fits_into_the_limit_and_arrives(texts, messages, numbers):
    names = ("summary", "traceback", "stack", "stderr", "evidence", "hostname")
    error = None
    for message in messages:
        made = type("Made" + "x" * (len(message) % 999), (LookupError,), {"__module__": message})
        error = raise_and_catch(made(message), error)
        error.__notes__ = [message, message]
    sent = make_failure(
        **dict(zip(("rank", "exit_code", "elapsed"), numbers, strict=True)),
        **dict(zip(names, texts, strict=False)),
        log_files={"stderr": texts[-2], "stdout": texts[-1]},
        exception=error,
    )
    encoded = dump_json(encode_failure(sent))
    assert len(encoded) <= MAX_FAILURE_BYTES
    back = decode_failure(json.loads(encoded))
    assert back.kind is sent.kind
    assert isinstance(back.exception, LookupError if messages else type(None))
    assert back.summary == sent.summary or len(sent.summary) > 30 or not sent.summary.isprintable()


VALID = through_json(make_failure(exception=make_error()))
REMOVED = "removed"


def paths_in(encoded, path=()):
    inner = encoded.items() if isinstance(encoded, dict) else enumerate(encoded) if isinstance(encoded, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from paths_in(value, (*path, key))


def change(encoded, path, value):
    for key in path[:-1]:
        encoded = encoded[key]
    if value == REMOVED:
        del encoded[path[-1]]
    else:
        encoded[path[-1]] = value


CHANGES = st.tuples(st.sampled_from(list(paths_in(VALID))), JSON | st.just(REMOVED) | st.integers(0, 5))


@given(st.lists(CHANGES, min_size=1, max_size=4))
def test_altered_data_is_refused_or_is_a_failure(changes):
    encoded = copy.deepcopy(VALID)
    for path, value in changes:
        with suppress(TypeError, LookupError):  # another change has removed it
            change(encoded, path, value)
    with suppress(InvalidMessageError):
        back = decode_failure(encoded)
        assert isinstance(back, ProcessFailure)
        traceback.format_exception(back.exception)
