"""Failures of another node: what must be known of them comes, whatever they are; what somebody made up harms nobody."""

import copy
import json
import linecache
import os
import traceback
from dataclasses import dataclass, fields
from typing import get_type_hints

import pytest
import saboteurs
from hypothesis import given
from hypothesis import strategies as st
from samples import other_value

from mpwatch import FailureKind, ProcessFailure
from mpwatch.multinode.protocol import failure_codec
from mpwatch.multinode.protocol.failure_codec import FAILURE_LIMIT, LEAST_LIMIT, LOCAL_FIELDS, from_plain, to_plain
from mpwatch.multinode.protocol.signed_json import InvalidEntryError, SignedJson, written

JOB = SignedJson(b"", "job")
SENT = {field.name for field in fields(ProcessFailure)} - LOCAL_FIELDS.keys()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["OOM", "ValueError", "eval"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
RAW = st.text(st.characters(categories=None))  # halves of surrogate pairs, and all that terminals obey
LONG = st.builds(lambda text, times: text * times, RAW, st.integers(0, 3000))


def failure(**more):
    known = {"rank": 3, "local_rank": 1, "pid": 77, "hostname": "node1", "kind": FailureKind.EXCEPTION, "exit_code": 1}
    return ProcessFailure(**{**known, **more})


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def through(error):
    """As if another node had told of it, over the store."""
    entry = JOB.close("place", {"failure": to_plain(failure(exception=error))})
    return from_plain(JOB.open("place", entry.encode())["failure"]).exception


def plain_of(error):
    return json.loads(written(to_plain(failure(exception=error))))


def size(plain):
    return len(written(plain).encode())


class OwnError(ValueError):
    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")


def graph():
    error = raised(OwnError(7, why="deep"), raised(KeyError("key"), raised(OSError(2, "gone", "path"))))
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
    evidence="the kernel says so",
    is_secondary=True,
    elapsed=12.25,
)


@pytest.mark.parametrize(
    "told", [FULL, failure(pid=None), failure(kind=FailureKind.START, elapsed=0)], ids=["full", "bare", "start"]
)
def test_all_fields_come_back(told):
    assert from_plain(json.loads(written(to_plain(told)))) == told


def test_every_field_of_a_failure_is_sent_or_explained():
    """A field that was added to ProcessFailure, and that is not sent, is listed in LOCAL_FIELDS."""
    sent = failure(**{name: other_value(hint) for name, hint in get_type_hints(ProcessFailure).items() if name in SENT})
    for field in fields(ProcessFailure):
        assert getattr(sent, field.name) != field.default or field.name in LOCAL_FIELDS
    back = from_plain(json.loads(written(to_plain(sent))))
    assert {field.name for field in fields(back) if getattr(back, field.name) != getattr(sent, field.name)} == set()
    assert all(LOCAL_FIELDS.values())


def test_a_new_field_of_a_failure_is_encoded():
    @dataclass(frozen=True, kw_only=True)
    class Extended(ProcessFailure):
        added: str = ""

    known = {field.name: getattr(FULL, field.name) for field in fields(FULL)}
    assert to_plain(Extended(**known, added="x" * 99))["added"] == "x" * 99


def test_an_exception_comes_back_as_one_that_except_catches():
    error = graph()
    back = through(error)
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


def test_a_traceback_is_printed_as_it_was_there():
    error = graph()
    there = [line for line in traceback.format_exception(error) if "^" not in line]
    back = through(error)
    back.__traceback__, raised_here = back.__traceback__, back
    assert traceback.format_exception(raised_here) == there
    frame = traceback.extract_tb(back.__traceback__)[0]
    assert (frame.filename, frame.name) == (__file__, "raised")
    assert frame.line == "raise error from cause"


def test_groups_and_contexts_come_back():
    inner = raised(OwnError(1, why="in a group"))
    inner.__context__ = KeyError("while")
    back = through(
        raised(BaseExceptionGroup("some", [inner, ExceptionGroup("more", [TypeError("t")]), KeyboardInterrupt()]))
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
def test_exceptions_with_words_of_their_own(error):
    back = through(raised(error))
    assert isinstance(back, type(error))
    assert str(back) == str(error)
    assert traceback.format_exception(back)[-1].endswith(f"{error!s}\n")


def test_what_resists_being_told_is_told():
    class Hostile(Exception):
        def __str__(self):
            raise SystemExit(3)

        def __reduce__(self):
            os._exit(3)

    back = through(raised(Hostile("\udc80")))
    assert type(back).__name__ == "Hostile"
    assert str(back) == "<its __str__ raised SystemExit>"


def test_a_recursion_keeps_its_beginning_and_its_end():
    try:
        saboteurs.recurses()
    except RecursionError as error:
        plain = plain_of(error)
        whole = traceback.extract_tb(error.__traceback__)
    frames = traceback.extract_tb(from_plain(plain).exception.__traceback__)
    assert 100 < len(frames) <= failure_codec.MAX_FRAMES < len(whole)
    for kept, frame in ((frames[0], whole[0]), (frames[-1], whole[-1])):
        assert (kept.name, kept.lineno) == (frame.name, frame.lineno)
    assert size(plain) < FAILURE_LIMIT


def test_long_texts_lose_their_middle_and_short_ones_nothing():
    text = "begin\n" + "x" * 900_000 + "\nend"
    plain = to_plain(failure(summary="short", traceback=text, stderr=text, exception=raised(OwnError(7, why=text))))
    assert size(plain) <= FAILURE_LIMIT
    back = from_plain(json.loads(written(plain)))
    assert back.summary == "short"
    for kept in (back.traceback, back.stderr, str(back.exception)):
        assert len(kept) > 4000
        assert kept.endswith("\nend")
        assert " characters ...]\n" in kept
    assert back.traceback.startswith("begin\n")


def test_the_furthest_causes_are_cut_off():
    error = None
    for number in range(2000):
        error = raised(ValueError(f"{number}: " + "x" * 5000), error)
    plain = plain_of(error)
    assert size(plain) <= FAILURE_LIMIT
    back = from_plain(plain).exception
    chain = []
    while back is not None:
        chain.append(str(back).partition(":")[0])
        back = back.__cause__
    assert chain == [str(1999 - number) for number in range(len(chain))]
    assert len(chain) > 10


@given(
    limit=st.integers(LEAST_LIMIT, FAILURE_LIMIT),
    texts=st.lists(LONG, min_size=8, max_size=8),
    messages=st.lists(LONG, max_size=3),
    numbers=st.tuples(st.integers(), st.integers(), st.floats()),
)
def test_any_failure_fits_and_comes_back(limit, texts, messages, numbers):
    summary, printed, stack, stderr, evidence, host, stream, path = texts
    rank, code, elapsed = numbers
    error = None
    for message in messages:
        error = raised(type("Made" + "x" * (len(message) % 999), (LookupError,), {"__module__": message})(message), error)
        error.__notes__ = [message, message]
    told = failure(
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
    plain = to_plain(told, limit=limit)
    assert size(plain) <= limit
    back = from_plain(JOB.open("place", JOB.close("place", plain).encode()))
    assert back.kind is told.kind
    assert isinstance(back.exception, LookupError if messages else type(None))
    assert back.summary == summary or len(summary) > 30 or not summary.isprintable()


@given(JSON)
def test_garbage_is_refused(garbage):
    with pytest.raises(InvalidEntryError):
        from_plain(garbage)


def places_in(plain, path=()):
    inner = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places_in(value, (*path, key))


VALID = plain_of(ExceptionGroup("some", [graph(), raised(TypeError("t"))]))
PLACES = list(places_in(VALID))


@given(
    changes=st.lists(st.tuples(st.sampled_from(PLACES), JSON | st.just("gone") | st.integers(0, 5)), min_size=1, max_size=4)
)
def test_what_was_altered_is_refused_or_is_a_failure(changes):
    plain = copy.deepcopy(VALID)
    for (*path, last), value in changes:
        at = plain
        try:
            for key in path:
                at = at[key]
            if value == "gone":
                del at[last]
            else:
                at[last] = value
        except (TypeError, LookupError):  # it has gone with another change
            continue
    try:
        back = from_plain(plain)
    except InvalidEntryError:
        return
    assert isinstance(back, ProcessFailure)
    if back.exception is not None:
        traceback.format_exception(back.exception)


def altered(*path, to):
    plain = copy.deepcopy(VALID)
    at = plain
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return plain


LINK = ("exception", "links", 0)


@pytest.mark.parametrize(
    ("plain", "why"),
    [
        ([], r"ProcessFailure must be a mapping, not \[\]"),
        (altered("kind", to="BORED"), "ProcessFailure.kind must be one of EXCEPTION, .*, not 'BORED'"),
        (altered("rank", to="1"), "ProcessFailure.rank must be a whole number"),
        (altered("pid", to=True), "ProcessFailure.pid must be"),
        (altered("hostname", to="a\x1b[2Jb"), "ProcessFailure.hostname must be a text .* without control characters"),
        (altered("stderr", to="x" * 70_000), "ProcessFailure.stderr must be a text of at most 65536 characters"),
        (altered("exception", "links", to=[]), "ExceptionGraph.links is empty"),
        (altered(*LINK, "bases", to=["eval"]), r"links\[0\].bases must be builtin exceptions, not 'eval'"),
        (altered(*LINK, "bases", to=["OSError", "SyntaxError"]), "ExceptionGraph.links make no exception: multiple bases"),
        (altered(*LINK, "bases", to=[]), r"links\[0\].bases is empty"),
        (altered(*LINK, "name", to="a\0b"), r"ExceptionGraph.links\[0\].name must be"),
        (altered(*LINK, "cause", to=99), r"links\[0\] refers to exception 99 of \d+"),
        (altered(*LINK, "members", to=[-1]), r"links\[0\] refers to exception -1 of \d+"),
        (altered(*LINK, "members", to=[0]), "has a group that is a member of itself"),
        (altered("exception", "links", 1, "frames", 0, to=["f"]), r"links\[1\].frames\[0\] must be 8 values"),
        (altered("exception", "links", 1, "frames", 0, 4, to=1 << 40), "ExceptionGraph.links make no exception"),
        (altered("exception", "links", 1, "frames", 0, 0, to="\0"), r"links\[1\].frames\[0\]\[0\] must be"),
    ],
    ids=range(17),
)
def test_it_says_what_is_wrong(plain, why):
    with pytest.raises(InvalidEntryError, match=why):
        from_plain(plain)


def test_lines_of_cells_come_along_under_a_name_of_their_own(monkeypatch):
    name = "<ipython-input-3-abc>"
    monkeypatch.setattr(linecache, "cache", {name: (0, None, ["1 / 0  # there\n"], name)})
    try:
        exec(compile("1 / 0", name, "exec"), {})
    except ZeroDivisionError as error:
        plain = plain_of(error)
    linecache.cache[name] = (0, None, ["1 / 0  # here\n"], name)
    frame = traceback.extract_tb(from_plain(plain).exception.__traceback__)[-1]
    assert (frame.filename, frame.line) == ("<ipython-input-3-abc on node1>", "1 / 0  # there")
    assert linecache.getline(name, 1) == "1 / 0  # here\n"


def test_nobody_brings_lines_for_files_of_this_node(monkeypatch):
    monkeypatch.setattr(linecache, "cache", {})
    plain = altered("exception", "sources", to={__file__: "lies\n" * 500, "<string>": "lies\n", "<frozen os>": "lies\n"})
    plain["exception"]["links"][1]["frames"].append(["<string>", "f", "f", 1, 1, "m", False, None])
    from_plain(plain)
    assert linecache.getline(__file__, 1) != "lies\n"
    assert linecache.getline("<string>", 1) == linecache.getline("<frozen os>", 1) == ""


def test_the_least_limit_holds_the_worst_of_failures():
    long = "x" * 999
    cls = type(long, tuple(OSError.__subclasses__()[:10]), {"__module__": long, "__str__": lambda _: long})
    cls.__qualname__ = long

    def recurse(depth):
        if depth == 0:
            raise cls from raised(ValueError(long))
        recurse(depth - 1)

    with pytest.raises(cls) as caught:
        recurse(50)
    caught.value.__notes__ = [long] * 99
    logs = {f"{number}{long}": long for number in range(20)}
    texts = dict.fromkeys(("summary", "traceback", "stack", "stderr", "evidence"), "x" * 9999)
    told = failure(hostname=long, log_files=logs, exception=caught.value, **texts)
    plain = to_plain(told, limit=LEAST_LIMIT)
    assert size(plain) <= LEAST_LIMIT
    back = from_plain(plain)
    assert all(isinstance(back.exception, base) for base in cls.__bases__)
    assert back.summary.startswith("xxx")


def test_a_limit_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 4096 bytes, not 100"):
        to_plain(failure(), limit=100)
