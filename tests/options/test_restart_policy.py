"""The validation of RestartPolicy: errors name the argument and its value."""

import math
import pickle
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import numpy
import pytest

import mpwatch
from mpwatch import FailureKind, RestartPolicy, WorkerSpec
from mpwatch.events import JsonLines

WHAT = "retry_if must be exception types, FailureKinds, a collection of them, or a function that takes a ProcessFailure"


def fn():
    pass


async def is_awaited(_):
    return True


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_restarts": -1}, ValueError, "max_restarts must be at least 0, not -1"),
        ({"max_restarts": 2.0}, TypeError, r"max_restarts must be an int, not 2\.0"),
        ({"max_restarts": True}, TypeError, "max_restarts must be an int, not True"),
        ({"max_restarts": None}, TypeError, "max_restarts must be an int, not None"),
        ({"max_restarts": "3"}, TypeError, "max_restarts must be an int, not '3'"),
        ({"scope": "rank"}, ValueError, "scope must be 'group' or 'worker', not 'rank'"),
        ({"scope": None}, ValueError, "scope must be 'group' or 'worker', not None"),
        ({"delay": -0.1}, ValueError, r"delay must be a number of seconds, 0 or more, not -0\.1"),
        ({"delay": math.inf}, ValueError, "delay must be a number of seconds, 0 or more, not inf"),
        ({"delay": 10**400}, ValueError, "delay must be a number of seconds, 0 or more, not 1000"),
        ({"delay": "1"}, TypeError, "delay must be a number of seconds, not '1'"),
        ({"delay": True}, TypeError, "delay must be a number of seconds, not True"),
        ({"max_delay": math.nan}, ValueError, "max_delay must be a number of seconds, 0 or more, not nan"),
        ({"max_delay": None}, TypeError, "max_delay must be a number of seconds, not None"),
        ({"jitter": 1.01}, ValueError, r"jitter must be a number from 0 to 1, not 1\.01"),
        ({"jitter": -0.1}, ValueError, r"jitter must be a number from 0 to 1, not -0\.1"),
        ({"jitter": math.nan}, ValueError, "jitter must be a number from 0 to 1, not nan"),
        ({"jitter": 10**400}, ValueError, "jitter must be a number from 0 to 1, not 1000"),
        ({"jitter": False}, TypeError, "jitter must be a number from 0 to 1, not False"),
        ({"jitter": "some"}, TypeError, "jitter must be a number from 0 to 1, not 'some'"),
        ({"retry_if": "ValueError"}, TypeError, f"{WHAT}, not 'ValueError'"),
        ({"retry_if": ValueError("x")}, TypeError, rf"{WHAT}, not ValueError\('x'\)"),
        ({"retry_if": int}, TypeError, f"{WHAT}, not <class 'int'>"),
        ({"retry_if": FailureKind}, TypeError, f"{WHAT}, not <enum 'FailureKind'>"),
        ({"retry_if": ()}, TypeError, rf"{WHAT}, not \(\)"),
        ({"retry_if": [ValueError, "OOM"]}, TypeError, rf"{WHAT}, not \[<class 'ValueError'>, 'OOM'\]"),
        ({"retry_if": {int}}, TypeError, WHAT),
        ({"retry_if": [[ValueError]]}, TypeError, WHAT),
        ({"retry_if": iter([ValueError])}, TypeError, WHAT),
        ({"retry_if": 3}, TypeError, f"{WHAT}, not 3"),
        ({"retry_if": is_awaited}, TypeError, "retry_if must be an ordinary function; .*is_awaited.* is async def"),
        ({"reset_after": 0}, ValueError, "reset_after must be a number of seconds, more than 0, not 0"),
        ({"reset_after": math.inf}, ValueError, "reset_after must be a number of seconds, more than 0, not inf"),
        ({"reset_after": "never"}, TypeError, "reset_after must be a number of seconds, not 'never'"),
        ({"max_no_progress": 0}, ValueError, "max_no_progress must be at least 1, not 0"),
        ({"max_no_progress": 1.5}, TypeError, r"max_no_progress must be an int, not 1\.5"),
    ],
)
def test_bad_arguments(options, error, text):
    with pytest.raises(error, match=text):
        RestartPolicy(**options)


def test_only_max_restarts_is_positional():
    assert RestartPolicy(5).max_restarts == 5
    with pytest.raises(TypeError):
        RestartPolicy(5, "worker")


def test_numbers_may_be_of_any_type():
    policy = RestartPolicy(numpy.int64(2), delay=numpy.float32(0.5), jitter=Fraction(1, 2), max_no_progress=numpy.int8(1))
    assert (type(policy.max_restarts), type(policy.max_no_progress)) == (int, int)


def test_a_policy_is_frozen_and_can_be_pickled():
    policy = RestartPolicy(2, retry_if={ValueError, FailureKind.OOM})
    assert pickle.loads(pickle.dumps(policy)) == policy
    with pytest.raises(FrozenInstanceError):
        policy.delay = 1.0


@pytest.mark.parametrize(
    ("retry_if", "causes"),
    [
        (None, set()),
        (print, set()),
        (ValueError, {ValueError}),
        (FailureKind.OOM, {FailureKind.OOM}),
        ([ValueError, FailureKind.OOM], {ValueError, FailureKind.OOM}),
    ],
)
def test_causes(retry_if, causes):
    assert RestartPolicy(retry_if=retry_if).causes == causes


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_restarts": -1}, ValueError, "max_restarts must be at least 0, not -1"),
        ({"max_restarts": 1.0}, TypeError, r"max_restarts must be an int, not 1\.0"),
        ({"max_restarts": True}, TypeError, "max_restarts must be an int, not True"),
        ({"max_restarts": {"max_restarts": 3}}, TypeError, r"max_restarts must be an int, not {'max_restarts': 3}"),
        (
            {"max_restarts": RestartPolicy(scope="worker"), "backend": "gloo"},
            ValueError,
            r"RestartPolicy\(scope='worker'\) is for ranks that do not communicate, but backend='gloo' makes a process group",
        ),
        ({"keep_going": True, "backend": "gloo"}, ValueError, "keep_going=True is for ranks that do not communicate"),
        ({"on_event": 3}, TypeError, "on_event must be a function that takes an Event, or several of them, not 3"),
        ({"on_event": [print, 3]}, TypeError, "on_event must be a function .* not 3"),
        ({"on_event": "log"}, TypeError, "on_event must be a function .* not 'log'"),
        ({"on_event": JsonLines}, TypeError, "on_event must be a function .* not <class '.*JsonLines'>"),
        ({"on_event": [print, is_awaited]}, TypeError, "on_event must be an ordinary function; 'is_awaited' is async def"),
    ],
)
def test_bad_options(options, error, text):
    with pytest.raises(error, match=text):
        WorkerSpec(fn=fn, nprocs=2, **options)
    with pytest.raises(error, match=text):
        mpwatch.run(fn, 2, **options)


def test_max_restarts_is_short_for_a_policy():
    assert WorkerSpec(fn=fn, nprocs=2).policy == RestartPolicy(0)
    assert WorkerSpec(fn=fn, nprocs=2, max_restarts=4).policy == RestartPolicy(4)
    assert WorkerSpec(fn=fn, nprocs=2, max_restarts=RestartPolicy(4, delay=1.0)).policy == RestartPolicy(4, delay=1.0)


def test_observers_are_one_or_several():
    assert WorkerSpec(fn=fn, nprocs=2).observers == ()
    assert WorkerSpec(fn=fn, nprocs=2, on_event=print).observers == (print,)
    assert WorkerSpec(fn=fn, nprocs=2, on_event=(each for each in [print, len])).observers == (print, len)


def test_a_spec_with_max_restarts_can_be_replaced():
    spec = WorkerSpec(fn=fn, nprocs=2, max_restarts=2)
    assert spec.max_restarts == spec.policy == replace(spec, nprocs=3).policy == RestartPolicy(2)
