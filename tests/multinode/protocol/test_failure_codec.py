"""Failures that are sent to other nodes: every failure fits and is decoded, and invalid data is refused without harm."""

import copy
import json
import linecache
import os
import traceback
from dataclasses import dataclass, fields
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwatch import FailureKind, ProcessFailure
from mpwatch.multinode.protocol import failure_codec
from mpwatch.multinode.protocol.failure_codec import (
    LOCAL_FIELDS,
    MAX_FAILURE_BYTES,
    MIN_FAILURE_BYTES,
    decode_failure,
    encode_failure,
)
from mpwatch.multinode.protocol.signed_json import InvalidEntryError, SignedJson, dump_json
from multinode.protocol.samples import make_value
from support import failing

JOB = SignedJson(b"", "job")
SENT = {field.name for field in fields(ProcessFailure)} - LOCAL_FIELDS.keys()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["OOM", "ValueError", "eval"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
RAW = st.text(st.characters(categories=None))  # includes surrogates, and control characters of terminals
LONG = st.builds(lambda text, times: text * times, RAW, st.integers(0, 3000))


def failure(**values):
    known = {"rank": 3, "local_rank": 1, "pid": 77, "hostname": "node1", "kind": FailureKind.EXCEPTION, "exit_code": 1}
    return ProcessFailure(**{**known, **values})


def raise_and_catch(error, cause=None):
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def send(error):
    """Return the exception as another node gets it from the store."""
    entry = JOB.encode("name", {"failure": encode_failure(failure(exception=error))})
    return decode_failure(JOB.decode("name", entry.encode())["failure"]).exception


def encode(error):
    return json.loads(dump_json(encode_failure(failure(exception=error))))


def json_size(encoded):
    return len(dump_json(encoded).encode())


class OwnError(ValueError):
    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")


def make_chain():
    error = raise_and_catch(
        OwnError(7, why="deep"), raise_and_catch(KeyError("key"), raise_and_catch(OSError(2, "missing", "path")))
    )
    error.add_note("first\nsecond")
    return error


FULL = failure(
    kind=FailureKind.SIGNAL,
    exit_code=137,
    signal=9,
    summary="OwnError: 7: deep",
    traceback="Traceback ...\n\tline\nOwnError: 7: deep\n",
    stack="Thread 1\n  File ...",
    stderr="warning: \u4e2d\u00a0\U0001f600\n",
    log_files={"stdout": "/logs/0/3.out", "stderr": "/logs/0/3.err"},
    evidence="the kernel log",
    is_secondary=True,
    elapsed=12.25,
)


@pytest.mark.parametrize(
    "sent", [FULL, failure(pid=None), failure(kind=FailureKind.START, elapsed=0)], ids=["full", "bare", "start"]
)
def test_all_fields_survive_a_round_trip(sent):
    assert decode_failure(json.loads(dump_json(encode_failure(sent)))) == sent


def test_every_field_of_a_failure_is_sent_or_explained():
    """If a new field of ProcessFailure is not sent, LOCAL_FIELDS must list it with the reason."""
    sent = failure(**{name: make_value(hint) for name, hint in get_type_hints(ProcessFailure).items() if name in SENT})
    for field in fields(ProcessFailure):
        assert getattr(sent, field.name) != field.default or field.name in LOCAL_FIELDS
    back = decode_failure(json.loads(dump_json(encode_failure(sent))))
    assert {field.name for field in fields(back) if getattr(back, field.name) != getattr(sent, field.name)} == set()
    assert all(LOCAL_FIELDS.values())


def test_a_new_field_of_a_failure_is_encoded():
    @dataclass(frozen=True, kw_only=True)
    class Extended(ProcessFailure):
        added: str = ""

    known = {field.name: getattr(FULL, field.name) for field in fields(FULL)}
    assert encode_failure(Extended(**known, added="x" * 99))["added"] == "x" * 99


def test_a_decoded_exception_is_caught_by_its_builtin_base():
    error = make_chain()
    back = send(error)
    assert type(back) is not OwnError
    assert type(back).__name__ == type(back).__qualname__ == "OwnError"
    assert type(back).__module__ == __name__
    with pytest.raises(ValueError, match=r"^7: deep"):
        raise back
    assert back.__notes__ == ["first\nsecond"]
    assert isinstance(back.__cause__, KeyError)
    assert str(back.__cause__) == "'key'"
    assert isinstance(back.__cause__.__cause__, FileNotFoundError)
    assert back.__cause__.__cause__.__cause__ is None


def test_a_traceback_is_printed_as_on_the_sending_node():
    error = make_chain()
    there = [line for line in traceback.format_exception(error) if "^" not in line]
    back = send(error)
    back.__traceback__, raised_here = back.__traceback__, back
    assert traceback.format_exception(raised_here) == there
    frame = traceback.extract_tb(back.__traceback__)[0]
    assert (frame.filename, frame.name) == (__file__, "raise_and_catch")
    assert frame.line == "raise error from cause"


def test_groups_and_contexts_survive_a_round_trip():
    inner = raise_and_catch(OwnError(1, why="in a group"))
    inner.__context__ = KeyError("while")
    back = send(
        raise_and_catch(BaseExceptionGroup("some", [inner, ExceptionGroup("more", [TypeError("t")]), KeyboardInterrupt()]))
    )
    assert back.message == "some"
    first, second, third = back.exceptions
    assert isinstance(first, ValueError)
    assert isinstance(first.__context__, KeyError)
    assert isinstance(second.exceptions[0], TypeError)
    assert isinstance(third, KeyboardInterrupt)
    assert "| more" in "".join(traceback.format_exception(back)).replace("ExceptionGroup: ", "")


@pytest.mark.parametrize(
    "error",
    [
        SyntaxError("bad", ("file.py", 3, 5, "text", 3, 6)),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_builtin_exceptions_that_format_their_own_text(error):
    back = send(raise_and_catch(error))
    assert isinstance(back, type(error))
    assert str(back) == str(error)
    assert traceback.format_exception(back)[-1].endswith(f"{error!s}\n")


def test_an_exception_that_resists_encoding_is_encoded():
    class Hostile(Exception):
        def __str__(self):
            raise SystemExit(3)

        def __reduce__(self):
            os._exit(3)

    back = send(raise_and_catch(Hostile("\udc80")))
    assert type(back).__name__ == "Hostile"
    assert str(back) == "<its __str__ raised SystemExit>"


def test_a_recursion_keeps_its_first_and_last_frames():
    try:
        failing.recurses()
    except RecursionError as error:
        encoded = encode(error)
        whole = traceback.extract_tb(error.__traceback__)
    frames = traceback.extract_tb(decode_failure(encoded).exception.__traceback__)
    assert 100 < len(frames) <= failure_codec.MAX_FRAMES < len(whole)
    for kept, frame in ((frames[0], whole[0]), (frames[-1], whole[-1])):
        assert (kept.name, kept.lineno) == (frame.name, frame.lineno)
    assert json_size(encoded) < MAX_FAILURE_BYTES


def test_long_texts_lose_their_middle_and_short_texts_stay_whole():
    text = "begin\n" + "x" * 900_000 + "\nend"
    encoded = encode_failure(
        failure(summary="short", traceback=text, stderr=text, exception=raise_and_catch(OwnError(7, why=text)))
    )
    assert json_size(encoded) <= MAX_FAILURE_BYTES
    back = decode_failure(json.loads(dump_json(encoded)))
    assert back.summary == "short"
    for kept in (back.traceback, back.stderr, str(back.exception)):
        assert len(kept) > 4000
        assert kept.endswith("\nend")
        assert " characters ...]\n" in kept
    assert back.traceback.startswith("begin\n")


def test_the_furthest_causes_are_left_out():
    error = None
    for number in range(2000):
        error = raise_and_catch(ValueError(f"{number}: " + "x" * 5000), error)
    encoded = encode(error)
    assert json_size(encoded) <= MAX_FAILURE_BYTES
    back = decode_failure(encoded).exception
    chain = []
    while back is not None:
        chain.append(str(back).partition(":")[0])
        back = back.__cause__
    assert chain == [str(1999 - number) for number in range(len(chain))]
    assert len(chain) > 10


@given(
    limit=st.integers(MIN_FAILURE_BYTES, MAX_FAILURE_BYTES),
    texts=st.lists(LONG, min_size=8, max_size=8),
    messages=st.lists(LONG, max_size=3),
    numbers=st.tuples(st.integers(), st.integers(), st.floats()),
)
def test_any_failure_fits_into_the_limit_and_is_decoded(limit, texts, messages, numbers):
    summary, printed, stack, stderr, evidence, host, stream, path = texts
    rank, code, elapsed = numbers
    error = None
    for message in messages:
        error = raise_and_catch(
            type("Made" + "x" * (len(message) % 999), (LookupError,), {"__module__": message})(message), error
        )
        error.__notes__ = [message, message]
    sent = failure(
        rank=rank,
        exit_code=code,
        elapsed=elapsed,
        hostname=host,
        summary=summary,
        traceback=printed,
        stack=stack,
        stderr=stderr,
        evidence=evidence,
        log_files={stream: path, "stdout": path},
        exception=error,
    )
    encoded = encode_failure(sent, limit=limit)
    assert json_size(encoded) <= limit
    back = decode_failure(JOB.decode("name", JOB.encode("name", encoded).encode()))
    assert back.kind is sent.kind
    assert isinstance(back.exception, LookupError if messages else type(None))
    assert back.summary == summary or len(summary) > 30 or not summary.isprintable()


@given(JSON)
def test_garbage_is_refused(garbage):
    with pytest.raises(InvalidEntryError):
        decode_failure(garbage)


def paths_in(encoded, path=()):
    inner = encoded.items() if isinstance(encoded, dict) else enumerate(encoded) if isinstance(encoded, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from paths_in(value, (*path, key))


VALID = encode(ExceptionGroup("some", [make_chain(), raise_and_catch(TypeError("t"))]))
REMOVED = "removed"
PATHS = list(paths_in(VALID))


@given(
    changes=st.lists(st.tuples(st.sampled_from(PATHS), JSON | st.just(REMOVED) | st.integers(0, 5)), min_size=1, max_size=4)
)
def test_altered_data_is_refused_or_is_a_failure(changes):
    encoded = copy.deepcopy(VALID)
    for (*path, last), value in changes:
        at = encoded
        try:
            for key in path:
                at = at[key]
            if value == REMOVED:
                del at[last]
            else:
                at[last] = value
        except (TypeError, LookupError):  # another change has removed it
            continue
    try:
        back = decode_failure(encoded)
    except InvalidEntryError:
        return
    assert isinstance(back, ProcessFailure)
    if back.exception is not None:
        traceback.format_exception(back.exception)


def alter(*path, to):
    encoded = copy.deepcopy(VALID)
    at = encoded
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return encoded


FIRST = ("exception", "exceptions", 0)


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        ([], r"ProcessFailure must be a mapping, not \[\]"),
        (alter("kind", to="UNKNOWN"), "ProcessFailure.kind must be one of EXCEPTION, .*, not 'UNKNOWN'"),
        (alter("rank", to="1"), "ProcessFailure.rank must be a whole number"),
        (alter("pid", to=True), "ProcessFailure.pid must be"),
        (alter("hostname", to="a\x1b[2Jb"), "ProcessFailure.hostname must be a text .* without control characters"),
        (alter("stderr", to="x" * 70_000), "ProcessFailure.stderr must be a text of at most 65536 characters"),
        (alter("exception", "exceptions", to=[]), "ExceptionGraph.exceptions is empty"),
        (alter(*FIRST, "bases", to=["eval"]), r"exceptions\[0\].bases must be builtin exceptions, not 'eval'"),
        (
            alter(*FIRST, "bases", to=["OSError", "SyntaxError"]),
            "ExceptionGraph.exceptions cannot be built: multiple bases",
        ),
        (alter(*FIRST, "bases", to=[]), r"exceptions\[0\].bases is empty"),
        (alter(*FIRST, "name", to="a\0b"), r"ExceptionGraph.exceptions\[0\].name must be"),
        (alter(*FIRST, "cause", to=99), r"exceptions\[0\] refers to exception 99 of \d+"),
        (alter(*FIRST, "members", to=[-1]), r"exceptions\[0\] refers to exception -1 of \d+"),
        (alter(*FIRST, "members", to=[0]), "has a group that is a member of itself"),
        (alter("exception", "exceptions", 1, "frames", 0, to=["f"]), r"exceptions\[1\].frames\[0\] must be 8 values"),
        (alter("exception", "exceptions", 1, "frames", 0, 4, to=1 << 40), "ExceptionGraph.exceptions cannot be built"),
        (alter("exception", "exceptions", 1, "frames", 0, 0, to="\0"), r"exceptions\[1\].frames\[0\]\[0\] must be"),
    ],
    ids=range(17),
)
def test_the_error_names_what_is_wrong(encoded, why):
    with pytest.raises(InvalidEntryError, match=why):
        decode_failure(encoded)


def test_lines_of_notebook_cells_are_sent_under_a_name_of_their_own(monkeypatch):
    name = "<ipython-input-3-abc>"
    monkeypatch.setattr(linecache, "cache", {name: (0, None, ["1 / 0  # there\n"], name)})
    try:
        exec(compile("1 / 0", name, "exec"), {})
    except ZeroDivisionError as error:
        encoded = encode(error)
    linecache.cache[name] = (0, None, ["1 / 0  # here\n"], name)
    frame = traceback.extract_tb(decode_failure(encoded).exception.__traceback__)[-1]
    assert (frame.filename, frame.line) == ("<ipython-input-3-abc on node1>", "1 / 0  # there")
    assert linecache.getline(name, 1) == "1 / 0  # here\n"


def test_sent_lines_never_replace_files_of_this_node(monkeypatch):
    monkeypatch.setattr(linecache, "cache", {})
    encoded = alter("exception", "sources", to={__file__: "false\n" * 500, "<string>": "false\n", "<frozen os>": "false\n"})
    encoded["exception"]["exceptions"][1]["frames"].append(["<string>", "f", "f", 1, 1, "m", False, None])
    decode_failure(encoded)
    assert linecache.getline(__file__, 1) != "false\n"
    assert linecache.getline("<string>", 1) == linecache.getline("<frozen os>", 1) == ""


def test_the_smallest_limit_holds_the_largest_failure():
    long = "x" * 999
    cls = type(long, tuple(OSError.__subclasses__()[:10]), {"__module__": long, "__str__": lambda _: long})
    cls.__qualname__ = long

    def recurse(depth):
        if depth == 0:
            raise cls from raise_and_catch(ValueError(long))
        recurse(depth - 1)

    with pytest.raises(cls) as caught:
        recurse(50)
    caught.value.__notes__ = [long] * 99
    logs = {f"{number}{long}": long for number in range(20)}
    texts = dict.fromkeys(("summary", "traceback", "stack", "stderr", "evidence"), "x" * 9999)
    sent = failure(hostname=long, log_files=logs, exception=caught.value, **texts)
    encoded = encode_failure(sent, limit=MIN_FAILURE_BYTES)
    assert json_size(encoded) <= MIN_FAILURE_BYTES
    back = decode_failure(encoded)
    assert all(isinstance(back.exception, base) for base in cls.__bases__)
    assert back.summary.startswith("xxx")


def test_a_limit_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="at least 4096 bytes, not 100"):
        encode_failure(failure(), limit=100)
