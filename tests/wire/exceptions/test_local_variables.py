"""The option `capture_locals`: the frames of a rank's exception have the text of their local variables."""

import pickle
import threading
import time
import traceback
from collections import defaultdict, deque
from dataclasses import dataclass

import pytest

import mpwatch
from mpwatch.wire.exceptions import local_variables
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.exceptions.local_variables import MAX_TEXT, MAX_VARIABLES, STOPPED, LocalText, format_local_variables


class Raises:
    def __repr__(self):
        raise SystemExit(3)


released = threading.Event()


class Hangs:
    def __repr__(self):
        released.wait()
        return "released"


class Prints:
    def __repr__(self):
        return "x" * 100_000


def catch(function, *args):
    with pytest.raises(ZeroDivisionError) as caught:
        function(*args)
    return caught.value.__traceback__.tb_next


def texts_of(function, *args):
    (frames,) = format_local_variables([catch(function, *args)])
    return frames


def divide(value, count=2):
    words = ["a", "b"]
    return zero(value, words) + count


def zero(value, words):
    return len(words) / 0


def test_each_frame_has_the_texts_of_its_own_variables():
    assert texts_of(divide, 7) == {
        0: {"value": "7", "count": "2", "words": "['a', 'b']"},
        1: {"value": "7", "words": "['a', 'b']"},
    }


def test_a_repr_that_raises_is_named():
    assert texts_of(divide, Raises())[0]["value"] == "<its repr raised SystemExit>"
    assert texts_of(divide, [Raises()])[0]["value"] == "[<its repr raised SystemExit>]"


def test_a_repr_that_hangs_is_left_out(monkeypatch):
    monkeypatch.setattr(local_variables, "LIMIT_SECONDS", 0.2)
    texts = texts_of(divide, 7, Hangs())
    assert texts[1] == {"value": "7", "words": "['a', 'b']"}
    assert texts[0]["count"] == STOPPED
    released.set()
    for thread in threading.enumerate():
        if thread.name == "mpwatch-locals":
            thread.join()


def test_texts_are_bounded():
    texts = texts_of(divide, Prints(), list(range(10_000)))[0]
    assert len(texts["value"]) <= MAX_TEXT
    assert texts["count"].endswith("19, ...]")


@dataclass
class Batch:
    number: int
    values: list


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"x" * 100_000_000, f"{b'x' * 500!r}..."),
        (range_dict := dict.fromkeys(range(1_000_000)), "{" + ", ".join(f"{n}: None" for n in range(20)) + ", ...}"),
        (defaultdict(int, range_dict), "defaultdict({" + ", ".join(f"{n}: None" for n in range(20)) + ", ...})"),
        (set(range(1_000_000)), "{" + ", ".join(map(str, range(20))) + ", ...}"),
        (Batch(1, [2] * 1_000_000), "Batch(number=1, values=[" + "2, " * 20 + "...])"),
        ((1,), "(1,)"),
        (set(), "set()"),
        (bytearray(b"x"), "bytearray(b'x')"),
        (deque([1]), "deque([1])"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_the_beginning_of_a_large_value_is_read(value, text, monkeypatch):
    monkeypatch.setattr(local_variables, "LIMIT_SECONDS", 60.0)
    assert texts_of(divide, value)[0]["value"] == text


def test_variables_are_bounded_in_number():
    names = [f"v{number}" for number in range(500)]
    code = f"def many():\n  {'='.join(names)} = 1\n  return 1 / 0"
    exec(code, space := {})
    assert len(texts_of(space["many"])[0]) == MAX_VARIABLES


def test_a_deep_recursion_has_texts_of_its_ends():
    def recurse(depth):
        return recurse(depth - 1) if depth else 1 / 0

    texts = texts_of(recurse, 500)
    assert texts[0]["depth"] == "500"
    assert texts[500]["depth"] == "0"
    assert len(texts) == 100


def test_an_exception_without_variables_starts_no_thread(monkeypatch):
    monkeypatch.setattr(threading, "Thread", None)
    assert ExceptionEncoder(KeyError("x")).locals()


def fail(secret):
    folder = {"a": 1}
    raise ValueError(folder)


def format_with_locals(error):
    return "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())


def test_the_callers_traceback_shows_the_variables_of_the_rank():
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(fail, 1, args=("s3cret",), debug="locals")
    cause = caught.value.__cause__
    assert format_with_locals(cause).endswith("    folder = {'a': 1}\n    secret = 's3cret'\nValueError: {'a': 1}\n")
    assert "secret     = 's3cret'" in str(pytest.ExceptionInfo.from_exception(cause).getrepr(showlocals=True))
    assert format_with_locals(pickle.loads(pickle.dumps(caught.value)).__cause__) == format_with_locals(cause)


def test_without_the_option_no_variables_are_sent():
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(fail, 1, args=("s3cret",))
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__cause__.__traceback__)]
    assert [frame.f_locals for frame in frames] == [{}]
    assert b"s3cret" not in pickle.dumps(caught.value)


def fail_with_hanging_repr():
    value = Hangs()
    raise ValueError(type(value).__name__)


def double(x):
    return 2 * x


def test_a_rank_with_a_hanging_repr_stays_in_its_group():
    with mpwatch.WorkerGroup(2, debug="locals") as group:
        started_at = time.monotonic()
        with pytest.raises(mpwatch.RunFailedError) as caught:
            group.run(fail_with_hanging_repr)
        assert time.monotonic() - started_at < 10
        assert STOPPED in format_with_locals(caught.value.__cause__)
        assert list(group.run(double, (2,))) == [4, 4]


def test_the_text_of_a_variable_is_its_repr():
    assert repr(LocalText("tensor([1.])")) == "tensor([1.])"
