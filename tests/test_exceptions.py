"""The exception of a rank reaches the caller as it was: type, attributes, causes, notes, members, frames and carets."""

import linecache
import pickle
import threading
import traceback

import pytest

from support import failing
from support.runs import failed


class RefusesToPickleError(ValueError):
    def __reduce__(self):
        raise RuntimeError("no")


def raise_with_everything():
    first, second = RefusesToPickleError("first", 1), failing.KeywordOnlyError(7, detail="two")
    second.__context__ = first
    try:
        {}["a"]
    except KeyError as cause:
        cause.add_note("of the cause")
        third = OSError(2, "No such file", "path")
        third.__cause__ = cause
    third.add_note("of the member")
    raise ExceptionGroup("some", [second, third])


def test_type_attributes_cause_context_notes_and_members_arrive():
    group = failed(raise_with_everything, 1).__cause__
    assert (type(group), group.message) == (ExceptionGroup, "some")
    second, third = group.exceptions
    assert type(second) is failing.KeywordOnlyError
    assert (str(second), vars(second)) == ("code 7: two", {"code": 7, "detail": "two"})
    assert isinstance(second.__context__, ValueError)
    assert repr(second.__context__) == "RefusesToPickleError(\"('first', 1)\")"
    assert (type(third), third.errno, third.filename) == (FileNotFoundError, 2, "path")
    assert third.__notes__ == ["of the member"]
    assert third.__suppress_context__
    assert type(third.__cause__) is KeyError
    assert third.__cause__.__notes__ == ["of the cause"]
    frames = traceback.extract_tb(third.__cause__.__traceback__)
    assert [(frame.name, frame.line) for frame in frames] == [("raise_with_everything", '{}["a"]')]


def raise_error_of_a_class_that_cannot_be_sent():
    class LocalHeldError(KeyError):
        held = threading.Lock()

    raise LocalHeldError("gone")


def test_an_exception_whose_class_cannot_be_sent_is_caught_by_its_builtin_class():
    error = failed(raise_error_of_a_class_that_cannot_be_sent, 1).__cause__
    assert (type(error).__name__, str(error)) == ("LocalHeldError", "'gone'")
    assert isinstance(error, KeyError)


def expression_of_several_lines():
    return sum(
        1 / n
        for n in (1, 0)
    )  # fmt: skip


def generated_code():
    source = "def generated():\n    return 1 + (\n        2 / 0\n    )\n"
    linecache.cache["<generated>"] = (len(source), None, source.splitlines(keepends=True), "<generated>")
    exec(compile(source, "<generated>", "exec"), names := {})
    return names["generated"]()


def endless_recursion():
    return endless_recursion() + 1


def raise_all():
    """Raise a group of all their exceptions. Each has its own traceback, as this process prints it, as `text`."""
    errors = []
    for example in (failing.raises_from_another_error, expression_of_several_lines, generated_code, endless_recursion):
        try:
            example()
        except Exception as error:
            error.text = traceback.format_exc()
            errors.append(error)
    raise ExceptionGroup("all", errors)


def test_tracebacks_are_printed_as_in_the_rank():
    errors = failed(raise_all, 1).__cause__.exceptions
    assert len(errors) == 4
    for error in errors:
        assert "".join(traceback.format_exception(error)) == error.text


def generate_and_fail(name):
    source = f"def made(x):\n    return 1 / x  # {name} of the rank\n"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names := {})
    names["made"](0)


def test_lines_of_code_that_a_rank_has_generated_are_known_then_and_replace_no_others(monkeypatch):
    monkeypatch.setattr(linecache, "cache", {**linecache.cache, "<known>": (4, None, ["ours"], "<known>")})
    for name in ("<made>", "<known>"):
        failed(generate_and_fail, 1, args=(name,))
    assert linecache.getline("<made>", 2) == "    return 1 / x  # <made> of the rank\n"
    assert linecache.getline("<known>", 1) == "ours"


def fail(secret):
    folder = {"a": 1}
    raise ValueError(folder)


def format_with_locals(error):
    return "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())


def test_the_callers_traceback_shows_the_variables_of_the_rank_if_the_option_is_set():
    error, without = failed(fail, 1, args=("s3cret",), debug="locals"), failed(fail, 1, args=("s3cret",))
    cause = error.__cause__
    assert format_with_locals(cause).endswith("    folder = {'a': 1}\n    secret = 's3cret'\nValueError: {'a': 1}\n")
    assert "secret     = 's3cret'" in str(pytest.ExceptionInfo.from_exception(cause).getrepr(showlocals=True))
    assert format_with_locals(pickle.loads(pickle.dumps(error)).__cause__) == format_with_locals(cause)
    assert [frame.f_locals for frame, _ in traceback.walk_tb(without.__cause__.__traceback__)] == [{}]
    assert b"s3cret" not in pickle.dumps(without)
