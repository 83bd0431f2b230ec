"""A call that cannot be sent raises before any rank is started, and the error names the part that cannot be pickled."""

import functools
import threading

import pytest

import mpwatch

lock = threading.Lock()


class Holder:
    def __init__(self, thing):
        self.thing = thing

    def method(self):
        pass


class Slotted:
    __slots__ = ("thing",)

    def __init__(self, thing):
        self.thing = thing


def make_user_of_global():
    """A function of `__main__`, in a test that is not `__main__`."""
    names = {"lock": lock, "__name__": "__main__"}
    exec("def train():\n    with lock: pass", names)
    return names["train"]


def local_user(thing):
    def train():
        return thing

    return train


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "text"),
    [
        (make_user_of_global(), (), {}, "fn 'train' uses the global 'lock', a _thread.lock, which cannot be sent"),
        (local_user(lock), (), {}, "fn '.*train' closes over 'thing', a _thread.lock"),
        (local_user([1, {"a": lock}]), (), {}, r"fn '.*train' closes over 'thing'\[1\]\['a'\], a _thread.lock"),
        (functools.partial(print, lock), (), {}, r"fn 'print'.args\[0\], a _thread.lock"),
        (Holder(lock).method, (), {}, "fn 'Holder.method', a method of Holder: self.thing, a _thread.lock"),
        (print, (1, Holder(lock)), {}, r"args\[1\].thing, a _thread.lock"),
        (print, (Slotted(Holder([lock])),), {}, r"args\[0\].thing.thing\[0\], a _thread.lock"),
        (dict, (), {"cfg": {"x": (lock,)}}, r"kwargs\['cfg'\]\['x'\]\[0\], a _thread.lock"),
        (print, ((n for n in ()),), {}, r"args\[0\], a builtins.generator"),
        (lambda default=lock: default, (), {}, r"has the default \[0\], a _thread.lock"),
    ],
)
def test_the_part_that_cannot_be_sent_is_named(fn, args, kwargs, text):
    with pytest.raises(mpwatch.LaunchError, match=text) as caught:
        mpwatch.run(fn, 2, args=args, kwargs=kwargs)
    assert "create it inside the function" in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_argument_that_contains_itself():
    loop = [lock]
    loop.append(loop)
    with pytest.raises(mpwatch.LaunchError, match=r"args\[0\]\[0\], a _thread.lock"):
        mpwatch.run(print, 2, args=(loop,))


class Part:
    def __init__(self, whole):
        self.whole = whole


class Odd(Part):
    def __reduce__(self):
        raise TypeError("never sent")


def test_parts_that_refer_to_the_whole_are_not_blamed():
    whole = Holder(None)
    whole.first, whole.second = Part(whole), Part(whole)
    whole.second.thing = lock
    with pytest.raises(mpwatch.LaunchError, match=r"args\[0\].second.thing, a _thread.lock"):
        mpwatch.run(print, 2, args=(whole,))
    del whole.first, whole.second
    whole.only = Odd(whole)
    with pytest.raises(mpwatch.LaunchError, match=r"args\[0\].only, a .*Odd"):
        mpwatch.run(print, 2, args=(whole,))


def test_a_second_failed_attempt_to_send_leaves_no_descriptor():
    """The connection's descriptor is duplicated before the lock fails to pickle. The leak check looks for the duplicate."""
    import multiprocessing

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with ours, theirs, pytest.raises(mpwatch.LaunchError, match=r"args\[1\]"):
        mpwatch.run(print, 2, args=(theirs, lock))
