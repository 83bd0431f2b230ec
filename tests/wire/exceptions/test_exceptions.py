"""Encode and decode exceptions within one process: each node of the graph must come back."""

import asyncio
import copyreg
import inspect
import marshal
import os
import pickle
import re
import sys
import threading
import traceback
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpwatch.wire.exceptions.decoder import decode_exception, read_cause_chain, read_traceback_text
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.exceptions.tracebacks import build_traceback, make_frame, read_frames
from support import failing


def raise_and_catch(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def round_trip(error):
    encoder = ExceptionEncoder(error)
    return decode_exception(encoder.plain(), encoder.details())


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


class RefusesToPickle(ValueError):
    def __reduce__(self):
        raise RuntimeError("no")


class ExitsWhenPickled(ValueError):
    def __reduce__(self):
        return os.sys.exit, (3,)


class RecursesWhenRebuilt(ValueError):
    def __reduce__(self):
        return failing.recurses, ()


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def local_class():
    class LocalError(LookupError):
        pass

    return LocalError("of a local class")


EXACT = [
    ValueError("plain", 3),
    KeyError("key"),
    OSError(2, "No such file", "path"),
    SystemExit(3),
    StopIteration("value"),
    SyntaxError("bad", ("file.py", 3, 5, "text", 3, 6)),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    KeyboardInterrupt("now"),
    asyncio.CancelledError("cancelled"),
    ImportError("no module", name="m", path="p"),
    local_class(),
    failing.KeywordOnlyError(7, detail="two"),
    NeedsNew(7, why="new"),
    Slotted(5),
]


@pytest.mark.parametrize("error", EXACT, ids=lambda error: type(error).__name__)
def test_type_text_and_attributes(error):
    back = round_trip(raise_and_catch(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    for name in ("args", "errno", "filename", "code", "value", "lineno", "start", "reason", "name", "path", "why", "detail"):
        assert getattr(back, name, None) == getattr(error, name, None)


@pytest.mark.parametrize(
    "error",
    [RefusesToPickle("text"), ExitsWhenPickled("text"), RecursesWhenRebuilt("text"), NoText("text")],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_that_cannot_be_pickled_are_rebuilt(error):
    back = round_trip(raise_and_catch(error))
    assert type(back) is type(error)
    assert back.args == ("text",)


def test_a_class_that_cannot_be_sent_has_a_stand_in():
    lock = threading.Lock()

    class Bound(KeyError):
        held = lock

    back = round_trip(raise_and_catch(Bound("gone")))
    assert type(back) is not Bound
    assert (type(back).__name__, str(back)) == ("Bound", "'gone'")
    with pytest.raises(KeyError):
        raise back


def test_the_chain_its_flags_and_notes():
    def fail():
        try:
            {}["a"]
        except KeyError as cause:
            cause.add_note("of the cause")
            raise ValueError("b") from cause

    with pytest.raises(ValueError, match="b") as caught:
        fail()
    back = round_trip(caught.value)
    assert isinstance(back.__cause__, KeyError)
    assert back.__suppress_context__
    assert back.__cause__ is back.__context__
    assert back.__cause__.__notes__ == ["of the cause"]


def test_one_node_that_cannot_be_pickled_does_not_take_the_rest_along():
    first, second = RefusesToPickle("first"), ValueError("second")
    second.__context__ = first
    first.lock = threading.Lock()
    back = round_trip(second)
    assert (str(back), str(back.__context__)) == ("second", "first")


def test_a_cycle():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    back = round_trip(first)
    assert str(back.__cause__) == "second"
    assert back.__cause__.__cause__ is back


def test_a_chain_of_300_and_a_traceback_of_1000_frames():
    error = None
    for number in range(300):
        node = ValueError(number)
        node.__cause__ = error
        error = node
    back, length = round_trip(error), 0
    while back is not None:
        back, length = back.__cause__, length + 1
    assert length == 300
    with pytest.raises(RecursionError) as caught:
        failing.recurses()
    frames = traceback.extract_tb(round_trip(caught.value).__traceback__)
    assert len(frames) == len(traceback.extract_tb(caught.value.__traceback__)) > 500


def test_groups_with_members_that_have_chains_of_their_own():
    member = raise_and_catch(OSError(2, "inner", "path"))
    member.__cause__ = ValueError("deep")
    group = raise_and_catch(BaseExceptionGroup("all", [KeyboardInterrupt(), ExceptionGroup("some", [member])]))
    back = round_trip(group)
    assert type(back) is BaseExceptionGroup
    assert back.message == "all"
    assert isinstance(back.exceptions[0], KeyboardInterrupt)
    assert str(back.exceptions[1].exceptions[0].__cause__) == "deep"
    assert back.exceptions[1].exceptions[0].__traceback__ is not None


def divide(numerator, denominator):
    return {"größe": numerator, "ratio": 1 + numerator / denominator}


def divide_on_several_lines():
    return divide(
        1,
        0,
    )


def frames_without_columns():
    exec(compile("1 / 0", "generated", "exec").replace(co_linetable=bytes([0x80 | 13 << 3 | 7, 0])))


@pytest.mark.parametrize("fn", [failing.raises_value_error, divide_on_several_lines, frames_without_columns])
def test_frames_are_printed_as_in_the_rank_carets_included(fn):
    with pytest.raises((ValueError, ZeroDivisionError)) as caught:
        fn()
    back = round_trip(caught.value)
    assert traceback.format_exception(back) == traceback.format_exception(caught.value)
    assert [position(mine) for mine in iterate_error_traceback(caught.value)] == [
        position(theirs) for theirs in iterate_error_traceback(back)
    ]


def position(trace):
    """Return the position of the instruction that raised, as the traceback module reads it."""
    return list(trace.tb_frame.f_code.co_positions())[trace.tb_lasti // 2]


def test_frames_with_a_position_that_cannot_be_compiled_come_back_without_columns():
    trace = catch_traceback(divide, 1, 0)
    for lasti, line in ((trace.tb_lasti, 7), (1 << 20, trace.tb_lineno), (-1, trace.tb_lineno)):
        made = types.TracebackType(None, trace.tb_frame, lasti, line)
        (back,) = iterate_traceback(build_traceback(read_frames(made)))
        assert back.tb_lineno == back.tb_frame.f_lineno == line
        assert position(back) == (line, line, None, None)


def catch_traceback(fn, *args):
    with pytest.raises(ZeroDivisionError) as caught:
        fn(*args)
    return caught.tb.tb_next


def test_headers_are_read_without_rebuilding():
    data = ExceptionEncoder(raise_and_catch(RefusesToPickle("text"))).plain()
    assert [(node.name, node.text) for node in read_cause_chain(data)] == [("RefusesToPickle", "text")]
    assert "RefusesToPickle: text" in read_traceback_text(data)


def test_the_host_s_copyreg_is_left_alone():
    before = dict(copyreg.dispatch_table)
    round_trip(raise_and_catch(ValueError("x")))
    assert copyreg.dispatch_table == before


def slotted_and_local(text):
    class Local(Slotted):
        __slots__ = ()

    return Local(text)


def with_attributes(text):
    error = ValueError(text)
    error.lock, error.code = threading.Lock(), text
    return error


def with_a_note(text):
    error = LookupError(text)
    error.add_note(text)
    return error


LEAVES = st.sampled_from(
    [
        *(ValueError, KeyError, OSError, SystemExit, StopIteration, KeyboardInterrupt, ZeroDivisionError),
        *(RefusesToPickle, ExitsWhenPickled, RecursesWhenRebuilt, Slotted, NoText, type(local_class())),
        *(slotted_and_local, with_attributes, with_a_note),
        *(failing.ExitsInStrError, failing.HidesItsArgumentsError, failing.RefusesAttributesError),
        lambda text: failing.KeywordOnlyError(text, detail=text),
        lambda text: NeedsNew(text, why=text),
        lambda text: UnicodeDecodeError("utf-8", text.encode(), 0, 1, text),
        lambda text: SyntaxError(text, (text, 3, 5, text, 3, 6)),
        lambda text: asyncio.CancelledError(text, lambda: None),
    ]
)
TREES = st.recursive(
    st.builds(lambda kind, text: raise_and_catch(kind(text)), LEAVES, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.builds(
            lambda text, members: raise_and_catch(BaseExceptionGroup(text, members)),
            st.text(max_size=5),
            st.lists(inner, min_size=1),
        ),
        st.builds(lambda error, cause: chain(error, cause=cause), inner, inner),
        st.builds(lambda error, context: chain(error, context=context), inner, inner),
        st.builds(lambda error, other: chain(chain(error, cause=other), context=other), inner, inner),
        st.builds(lambda error, other: (chain(other, cause=error), chain(error, cause=other))[1], inner, inner),  # a circle
    ),
    max_leaves=8,
)


def chain(error, cause=None, context=None):
    if cause is not None:
        BaseException.__setattr__(error, "__cause__", cause)  # some classes forbid it
    if context is not None and context is not error:
        BaseException.__setattr__(error, "__context__", context)
    return error


def text(error):
    try:
        return str(error)
    except BaseException as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def describe_graph(error, seen=()):
    """Return what must survive: type names, texts, the form of the graph, innermost frames."""
    if error is None or id(error) in seen:
        return None
    seen = (*seen, id(error))
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    frames = traceback.extract_tb(error.__traceback__)
    return (
        type(error).__name__,
        error.message if members else re.sub(r"0x[0-9a-f]+", "", text(error)),
        getattr(error, "__notes__", None),
        (frames[-1].filename, frames[-1].name, frames[-1].lineno) if frames else None,
        describe_graph(error.__cause__, seen),
        describe_graph(error.__context__, seen),
        error.__suppress_context__,
        [describe_graph(member, seen) for member in members],
    )


@settings(max_examples=200)
@given(TREES)
def test_any_tree_keeps_its_shape(error):
    assert describe_graph(round_trip(error)) == describe_graph(error)
    assert describe_graph(decode_exception(ExceptionEncoder(error).plain())) == describe_graph(error)
    assert describe_graph(round_trip(round_trip(error))) == describe_graph(error)


def test_messages_contain_only_builtin_values_and_pickles():
    encoder = ExceptionEncoder(raise_and_catch(failing.KeywordOnlyError(7, detail="x")))
    (node,), (part,) = marshal.loads(encoder.plain())["nodes"], pickle.loads(encoder.details())
    assert {type(value) for value in node.values()} <= {str, list, bool, int, type(None)}
    assert {type(value) for value in part.values()} <= {bytes, list, dict, type(None)}


def test_without_details_there_are_stand_ins_of_the_same_shape():
    error = raise_and_catch(failing.KeywordOnlyError(7, detail="x"))
    error.__cause__ = raise_and_catch(OSError(2, "No such file", "path"))
    back = decode_exception(ExceptionEncoder(error).plain())
    assert (type(back).__name__, str(back)) == ("KeywordOnlyError", str(error))
    assert isinstance(back.__cause__, OSError)
    assert str(back.__cause__) == str(error.__cause__)
    assert back.__traceback__ is not None


class Spoken(str):
    __slots__ = ()

    def __reduce_ex__(self, _):
        return os._exit, (3,)

    def __str__(self):
        return self


class SpeaksError(Exception):
    def __str__(self):
        return Spoken("text")


def test_texts_that_are_no_plain_strings():
    error = raise_and_catch(SpeaksError())
    error.add_note(Spoken("note"))
    back = decode_exception(ExceptionEncoder(error).plain())
    assert (type(back).__name__, str(back), back.__notes__) == ("SpeaksError", "text", ["note"])
    assert type(back.__notes__[0]) is str


class OwnCauseError(Exception):
    __cause__ = property(lambda self: None)
    __traceback__ = property(lambda self: 1 / 0)


class OwnEverythingError(Exception):
    def __getattribute__(self, name):
        raise LookupError(name)


class OwnNotesError(Exception):
    __notes__ = property(lambda self: 1 / 0)


class OwnMessageError(ExceptionGroup):
    message = property(lambda self: 1 / 0)


class MixedError(ExceptionGroup, LookupError):
    pass


class BothError(KeyError, AttributeError):
    held = threading.Lock()


@pytest.mark.parametrize(
    "cls",
    [OwnCauseError, OwnEverythingError, OwnNotesError, OwnMessageError, MixedError, BothError],
    ids=lambda cls: cls.__name__,
)
def test_classes_that_override_builtin_attributes(cls):
    """The encoder reads the attributes of BaseException instead."""
    error = cls("x", [ValueError("y")]) if issubclass(cls, ExceptionGroup) else cls("x")
    BaseException.__dict__["__cause__"].__set__(error, ValueError("cause"))
    back = round_trip(error)
    assert type(back).__name__ == cls.__name__
    assert str(BaseException.__dict__["__cause__"].__get__(back)) == "cause"
    assert all(issubclass(type(back), base) for base in cls.__mro__ if base.__module__ == "builtins")


def test_a_set_among_the_arguments_may_come_back_in_another_order():
    words = set(map(str, range(200)))
    words -= set(map(str, range(100)))
    back = round_trip(raise_and_catch(RuntimeError("missing", words)))
    assert type(back) is RuntimeError
    assert back.args == ("missing", words)


class ExitsWhenLoaded:
    def __reduce__(self):
        return os.sys.exit, (3,)


def test_an_attribute_that_exits_when_it_is_loaded_takes_nothing_along():
    error = raise_and_catch(failing.KeywordOnlyError(7, detail="x"))
    error.trouble = ExitsWhenLoaded()
    back = round_trip(error)
    assert type(back) is failing.KeywordOnlyError
    assert (back.code, back.detail, hasattr(back, "trouble")) == (7, "x", False)


def test_attributes_in_the_pickle_are_not_sent_twice():
    error = raise_and_catch(ValueError("x"))
    error.data = bytes(100_000)
    assert len(ExceptionEncoder(error).details()) < 150_000
    group = raise_and_catch(failing.nested_group(100))
    assert len(ExceptionEncoder(group).details()) < 100_000


def test_frames_have_the_attributes_that_a_debugger_reads():
    with pytest.raises(ValueError, match="batch") as caught:
        failing.raises_value_error()
    for mine, theirs in zip(
        iterate_error_traceback(caught.value), iterate_error_traceback(round_trip(caught.value)), strict=True
    ):
        for name in ("co_filename", "co_name", "co_qualname", "co_firstlineno"):
            assert getattr(mine.tb_frame.f_code, name) == getattr(theirs.tb_frame.f_code, name)
        assert mine.tb_lineno == theirs.tb_lineno == theirs.tb_frame.f_lineno
        assert theirs.tb_lasti >= 0
        assert inspect.getframeinfo(theirs).code_context == inspect.getframeinfo(mine).code_context


@pytest.mark.parametrize(("first", "line"), [(1, 1), (5, 3), (1, 100_000), (70, 6), (10, 0)])
def test_any_line_of_any_function(first, line):
    frame = make_frame(file="file.py", name="f", qualname="A.f", first_line=first, line=line, module="module")
    (trace,) = iterate_traceback(build_traceback([frame]))
    assert (trace.tb_lineno, trace.tb_frame.f_lineno) == (line, line)
    assert trace.tb_frame.f_globals["__name__"] == "module"


def iterate_traceback(trace):
    while trace is not None:
        yield trace
        trace = trace.tb_next


def iterate_error_traceback(error):
    return list(iterate_traceback(error.__traceback__))


def test_a_very_long_text_is_cut():
    error = raise_and_catch(ValueError("x" * (3 << 20)))
    assert len(ExceptionEncoder(error).plain()) < 4 << 20
    assert len(str(round_trip(error))) == 3 << 20


def test_a_frame_that_hides_itself_is_hidden_still():
    def helper(hide):
        __tracebackhide__ = hide
        raise ValueError("no")

    def flags(hide):
        try:
            helper(hide)
        except ValueError as error:
            back = round_trip(error)
        return [dict(trace.tb_frame.f_locals) for trace in iterate_traceback(back.__traceback__)]

    assert flags(True) == [{}, {"__tracebackhide__": True}]
    assert flags(False) == flags(str) == [{}, {}]


@pytest.mark.parametrize("outcome", [pytest.skip, pytest.fail, pytest.xfail])
def test_a_class_that_claims_to_be_builtin_comes_back_as_itself(outcome):
    error = raise_and_catch(outcome.Exception("why", pytrace=False))
    back = round_trip(error)
    assert type(back) is outcome.Exception
    assert (back.msg, back.pytrace) == ("why", False)


def test_a_module_with_lazy_attributes_loads_none(monkeypatch):
    def load(name):
        raise RuntimeError(f"{name} cannot be loaded")

    lazy = types.ModuleType("lazy")
    lazy.Base = type("Base", (Exception,), {"__module__": "lazy"})
    lazy.__getattr__ = load
    monkeypatch.setitem(sys.modules, "lazy", lazy)

    class Local(lazy.Base):
        pass

    assert type(round_trip(raise_and_catch(Local("text")))) is Local


def test_a_stand_in_for_a_class_that_claims_to_be_builtin():
    error = raise_and_catch(pytest.fail.Exception("why"))
    back = decode_exception(ExceptionEncoder(error).plain())
    assert (type(back).__name__, str(back), type(back).__bases__) == ("Failed", "why", (BaseException,))


@pytest.mark.parametrize("cls", [SyntaxError, IndentationError])
def test_a_stand_in_of_a_syntax_error_is_printed_with_its_text(cls):
    back = decode_exception(ExceptionEncoder(cls("bad", ("file.py", 3, 5, "text", 3, 6))).plain())
    assert str(back) == "bad (file.py, line 3)"
    assert traceback.format_exception(back) == [f"{cls.__name__}: bad (file.py, line 3)\n"]
