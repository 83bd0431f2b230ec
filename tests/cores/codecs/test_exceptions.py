"""Encode and decode exceptions within one process: each node of the graph must come back."""

import asyncio
import re
import sys
import threading
import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpwatch.wire.exceptions.decoder import decode_exception, read_cause_chain
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from support import failing


def catch(function, *args):
    try:
        function(*args)
    except BaseException as caught:
        caught.__traceback__ = caught.__traceback__.tb_next
        return caught


def raise_and_catch(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def round_trip(error):
    encoder = ExceptionEncoder(error)
    return decode_exception(encoder.plain(), encoder.details())


def make_stand_in(error):
    """Return what comes of an exception if the rank has died before it could send the details."""
    return decode_exception(ExceptionEncoder(error).plain())


class NeedsNew(Exception):
    def __new__(cls, code, *, why):
        self = super().__new__(cls, code)
        self.why = why
        return self

    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__("slotted")
        self.code = code


class PicklesItself(Exception):
    def __init__(self, code, hint):
        super().__init__(f"{code}: {hint}")
        self.code, self.lock = code, threading.Lock()

    def __reduce__(self):
        return PicklesItself, (self.code, "came back")


class RefusesToPickle(ValueError):
    def __reduce__(self):
        raise RuntimeError("no")


class ExitsWhenPickled(ValueError):
    def __reduce__(self):
        return sys.exit, (3,)


class RecursesWhenRebuilt(ValueError):
    def __reduce__(self):
        return failing.recurses, ()


class LooksUp(Exception):
    def __getattr__(self, name):
        return self.__dict__["payload"][name]  # KeyError


class RefusesAttributesError(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)


class ExitsInStrError(Exception):
    def __str__(self):
        return str(sys.exit(0))


class HidesItsArgumentsError(Exception):
    @property
    def args(self):
        raise RuntimeError("no arguments")


def local_error(text):
    return type("LocalError", (LookupError,), {})(text)


def hold(error, **attributes):
    vars(error).update(attributes)
    return error


# --- One exception


def name_of_type(error):
    return type(error).__name__


ATTRIBUTES = ("args", "errno", "filename", "code", "lineno", "start", "reason", "name", "path", "why", "detail", "msg")
ERRORS = [
    OSError(2, "No such file", "path"),
    SystemExit(3),
    SyntaxError("bad", ("file.py", 3, 5, "text", 3, 6)),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    ImportError("no module", name="m", path="p"),
    local_error("of a local class"),
    failing.KeywordOnlyError(7, detail="two"),
    NeedsNew(7, why="new"),
    Slotted(5),
    RefusesAttributesError("text"),
    PicklesItself(7, "came back"),
    pytest.skip.Exception("why", pytrace=False),  # its class claims to be builtin
]


@pytest.mark.parametrize("error", ERRORS, ids=name_of_type)
def test_type_text_and_attributes(error):
    back = round_trip(raise_and_catch(error))
    assert (type(back), str(back), vars(back).keys()) == (type(error), str(error), vars(error).keys())
    for name in ATTRIBUTES:
        assert getattr(back, name, None) == getattr(error, name, None)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (failing.KeywordOnlyError(7, detail="x"), Exception),
        (SyntaxError("bad", ("file.py", 3, 5, "text", 3, 6)), SyntaxError),
        (type("MissingFile", (KeyError, OSError), {"__str__": lambda _: "gone"})(), OSError),
        (pytest.fail.Exception("why"), BaseException),  # its class claims to be builtin
    ],
)
def test_without_details_a_stand_in_is_printed_like_the_exception(error, base):
    back = make_stand_in(raise_and_catch(error))
    assert isinstance(back, base)
    assert traceback.format_exception(back)[-1].endswith(f"{type(error).__name__}: {error}\n")
    assert back.__traceback__ is not None


# --- The graph of causes, contexts and members


def with_a_note(text):
    error = LookupError(text)
    error.add_note(text)
    return error


def chain(error, cause=None, context=None):
    for name, other in (("__cause__", cause), ("__context__", context)):
        if other is not None and other is not error:
            BaseException.__setattr__(error, name, other)  # some classes forbid it
    return error


LEAVES = st.sampled_from(
    [
        *(ValueError, KeyError, OSError, SystemExit, StopIteration, KeyboardInterrupt),
        *(RefusesToPickle, ExitsWhenPickled, RecursesWhenRebuilt, Slotted),
        *(local_error, with_a_note),
        *(ExitsInStrError, HidesItsArgumentsError, RefusesAttributesError),
        lambda text: hold(ValueError(text), lock=threading.Lock(), code=text),
        lambda text: hold(failing.KeywordOnlyError(text, detail=text), trouble=ExitsWhenPickled()),
        lambda text: PicklesItself(threading.Lock(), text),
        lambda text: hold(LooksUp(text), payload={}),
        lambda text: failing.KeywordOnlyError(text, detail=text),
        lambda text: UnicodeDecodeError("utf-8", text.encode(), 0, 1, text),
        lambda text: asyncio.CancelledError(text, lambda: None),
    ]
)
TEXTS = st.text(max_size=5)
TREES = st.recursive(
    st.builds(lambda kind, text: raise_and_catch(kind(text)), LEAVES, TEXTS),
    lambda inner: st.one_of(
        st.builds(lambda text, each: raise_and_catch(BaseExceptionGroup(text, each)), TEXTS, st.lists(inner, min_size=1)),
        st.builds(chain, inner, cause=inner, context=st.none() | inner),
        st.builds(lambda error, other: (chain(other, cause=error), chain(error, cause=other))[1], inner, inner),  # a circle
    ),
    max_leaves=8,
)


def text_of(error):
    try:
        return str(error)
    except BaseException as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def describe_graph(error, seen=()):
    if error is None or id(error) in seen:
        return None
    seen = (*seen, id(error))
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    frames = traceback.extract_tb(error.__traceback__)
    return (
        type(error).__name__,
        error.message if members else re.sub(r"0x[0-9a-f]+", "", text_of(error)),
        vars(error).get("__notes__"),
        (frames[-1].filename, frames[-1].name, frames[-1].lineno) if frames else None,
        *(describe_graph(error.__cause__, seen), describe_graph(error.__context__, seen), error.__suppress_context__),
        [describe_graph(member, seen) for member in members],
    )


@settings(max_examples=60)
@given(TREES)
def test_any_graph_keeps_its_shape(error):
    graph = describe_graph(error)
    back = round_trip(error)
    assert describe_graph(back) == describe_graph(make_stand_in(error)) == describe_graph(round_trip(back)) == graph


def test_a_chain_of_300():
    error = None
    for number in range(300):
        error = chain(ValueError(str(number)), cause=error)
    for sent in (error, round_trip(error)):
        assert len(read_cause_chain(ExceptionEncoder(sent).plain())) == 300


def test_a_long_text_is_cut_and_nothing_is_sent_twice():
    error = raise_and_catch(ValueError("x" * (3 << 20)))
    assert len(ExceptionEncoder(error).plain()) < 4 << 20
    assert len(str(round_trip(error))) == 3 << 20
    assert len(ExceptionEncoder(hold(raise_and_catch(ValueError("x")), data=bytes(100_000))).details()) < 150_000
    nested = ValueError("innermost")
    for _ in range(100):
        nested = ExceptionGroup("one", [nested])
    assert len(ExceptionEncoder(nested).details()) < 100_000


# --- Frames


def raise_without_columns():
    exec(compile("1 / 0", "generated", "exec").replace(co_linetable=bytes([0x80 | 13 << 3 | 7, 0])))


@pytest.mark.parametrize("fn", [failing.raises_value_error, failing.raises_from_another_error, raise_without_columns])
def test_a_traceback_is_printed_as_in_the_rank(fn):
    error = catch(fn)
    assert traceback.format_exception(round_trip(error)) == traceback.format_exception(error)


@pytest.mark.parametrize(("hide", "is_hidden"), [(True, True), (False, False), (str, False)])
def test_a_frame_that_hides_itself_is_hidden_still(hide, is_hidden):
    def helper(hide):
        __tracebackhide__ = hide
        raise ValueError("no")

    frame = round_trip(catch(helper, hide)).__traceback__.tb_frame
    assert frame.f_locals.get("__tracebackhide__", False) is is_hidden
