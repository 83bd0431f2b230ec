"""Arguments that do not fit the function are refused before a rank is started."""

import functools
import os

import pytest

import mpwatch
from mpwatch.options.spec import check_call
from support import functions


def train(lr, *, epochs=1):
    pass


def take_anything(*args, **kwargs):
    pass


def with_optional(a, b=2, /, c=3):
    pass


class Model:
    def __init__(self, size):
        self.size = size

    def fit(self, data):
        pass

    def __call__(self, x):
        pass


class BadRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


def with_bad_default(x=BadRepr()):  # noqa: B008
    pass


def inject_config(fn):
    """Decorate a function as hydra does: the caller passes no argument."""

    @functools.wraps(fn)
    def wrapper():
        return fn({"lr": 1})

    return wrapper


@inject_config
def configured(config):
    pass


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "text"),
    [
        (train, [(0,), (1,)], None, r"fn train\(lr, \*, epochs=1\) cannot be called .*: too many positional arguments"),
        (train, (), None, "missing a required argument: 'lr'"),
        (train, (1,), {"epoch": 2}, "got an unexpected keyword argument 'epoch'"),
        (train, (1,), {"lr": 2}, "multiple values for argument 'lr'"),
        (functools.partial(train, 1), (2,), None, "fn train.*too many positional arguments"),
        (Model(1).fit, (), None, r"fn Model\.fit\(data\) cannot be called .*'data'"),
        (Model(1), (1, 2), None, "fn Model.*too many"),
        (Model, (), None, r"fn Model\(size\).*'size'"),
        (with_optional, (1, 2, 3, 4), None, "too many"),
        (with_bad_default, (1, 2), None, "fn with_bad_default cannot be called"),
        (print, (1,), {"color": 1}, "'color'"),
        (configured, (1,), None, "too many"),
        (functions.rank, (mpwatch.PerRank([1, 2]),), None, "too many"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(fn, args, kwargs, text):
    with pytest.raises(TypeError, match=text) as caught:
        mpwatch.run(fn, 2, args=args, kwargs=kwargs)
    assert "PerRank([a, b])" in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [
        (train, (1,), {"epochs": 2}),
        (train, (), {"lr": 1}),
        (with_optional, (1,), None),
        (with_optional, (1, 2), {"c": 4}),
        (take_anything, (1, 2), {"x": 3}),
        (functools.partial(train, epochs=2), (1,), None),
        (Model(1).fit, (1,), None),
        (Model, (1,), None),
        (configured, (), None),  # though the function in it takes an argument
        (dict, (), {"a": 1}),  # it has no signature
        (os.getpid, (), None),
    ],
)
def test_arguments_that_fit_are_accepted(fn, args, kwargs):
    check_call(fn, args, kwargs)


def test_a_signature_that_was_set_by_hand_is_not_checked():
    def fn():
        pass

    fn.__signature__ = "anything"
    check_call(fn, (1, 2), {"x": 1})


def test_a_group_refuses_them_too_and_goes_on():
    with mpwatch.WorkerGroup(1) as group:
        for call in (group.run, group.submit):
            with pytest.raises(TypeError, match=r"fn double\(x, plus=0\) cannot be called"):
                call(functions.double, (1, 2, 3))
        assert list(group.run(functions.double, (1, 2))) == [4]
