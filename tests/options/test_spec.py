"""The errors for invalid options name the option and its value."""

import asyncio
import functools
import math
import os
import signal

import pytest

import mpwatch
from mpwatch import WorkerSpec
from mpwatch.options.spec import NOT_FORWARDED
from mpwatch.os_support.signals import name_signal


def fn():
    pass


async def coroutine():
    pass


async def agenerator():
    yield


class AsyncCallable:
    async def __call__(self):
        pass


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"nprocs": 0}, ValueError, "nprocs must be at least 1, .* not 0"),
        ({"nprocs": -1}, ValueError, "nprocs must be at least 1, .* not -1"),
        ({"nprocs": True}, TypeError, "nprocs must be an int, .* not True"),
        ({"nprocs": 2.5}, TypeError, "nprocs must be an int, .* not 2.5"),
        ({"nprocs": None}, TypeError, "nprocs must be an int, .* not None"),
        ({"nprocs": "many"}, ValueError, "nprocs .* not 'many'"),
        ({"nprocs": "gpu"}, ValueError, "nprocs='gpu', but torch sees no GPU here"),
        ({"fn": 3}, TypeError, "fn must be callable, not 3"),
        ({"fn": None}, TypeError, "fn must be callable, not None"),
        ({"fn": coroutine}, TypeError, "'coroutine' is async def"),
        ({"fn": agenerator}, TypeError, "'agenerator' is async def"),
        ({"fn": functools.partial(coroutine)}, TypeError, "async def"),
        ({"fn": AsyncCallable()}, TypeError, "async def"),
        ({"args": "ab"}, TypeError, "args must be a sequence .* not 'ab'"),
        ({"args": 3}, TypeError, "args must be a sequence .* not 3"),
        ({"args": {1, 2}}, TypeError, "args must be a sequence"),
        ({"kwargs": [1]}, TypeError, r"kwargs must be a mapping .* not \[1\]"),
        ({"kwargs": {1: 2}}, TypeError, "kwargs must have strings as keys, not 1"),
        ({"backend": 3}, TypeError, "backend must be a string or None, not 3"),
        ({"backend": ""}, ValueError, "backend must name a backend"),
        ({"env": "A=1"}, TypeError, "env must be a mapping .* not a value of type str$"),
        ({"env": {"A": 1}}, TypeError, "env must map strings to strings; 'A' has a value of type int$"),
        ({"env": {"A=B": "1"}}, ValueError, "env has a variable that no environment can hold: 'A=B'$"),
        ({"env": {"A": "\0"}}, ValueError, "no environment can hold"),
        ({"env": {"RANK": "1"}}, ValueError, "env may not set RANK: it identifies the rank, so mpwatch sets it$"),
        ({"env": {"MASTER_PORT": "http"}}, ValueError, "must give MASTER_PORT as a TCP port, a number from 1 to 65535$"),
        ({"env": {"A": "\ud800"}}, ValueError, "cannot be encoded: 'A'$"),
        ({"role": "a\nb"}, ValueError, "role must be a name"),
        ({"timeout": -1}, ValueError, "timeout must be a number of seconds, more than 0, not -1"),
        ({"timeout": 0}, ValueError, "timeout .* not 0"),
        ({"timeout": math.inf}, ValueError, "timeout .* not inf"),
        ({"timeout": "5"}, TypeError, "timeout must be a number of seconds, not '5'"),
        ({"grace_period": math.nan}, ValueError, "grace_period .* not nan"),
        ({"grace_period": -0.1}, ValueError, "grace_period .* 0 or more, not -0.1"),
        ({"grace_period": None}, TypeError, "grace_period must be a number of seconds, not None"),
        ({"role": 1}, TypeError, "role must be a string, not 1"),
        ({"role": ""}, ValueError, "role must be a name, not ''"),
        ({"bind": "core"}, ValueError, "bind must be 'cores', 'numa', a function .* or None, not 'core'"),
        ({"bind": {0, 1}}, TypeError, "bind must be 'cores', 'numa', a function from Worker .* not {0, 1}"),
        ({"bind": True}, TypeError, "bind must be .* not True"),
        ({"bind": set}, TypeError, "bind must be .* not <class 'set'>"),
        ({"bind": coroutine}, TypeError, "bind must be an ordinary function; 'coroutine' is async def"),
        ({"visible_devices": "all"}, ValueError, "visible_devices must be 'own' or None, not 'all'"),
        ({"visible_devices": [0]}, TypeError, r"visible_devices must be 'own' or None, not \[0\]"),
        ({"forward_signals": signal.SIGUSR1}, TypeError, r"forward_signals must be a tuple .*\(signal.SIGUSR1,\), not <Sig"),
        ({"forward_signals": None}, TypeError, "forward_signals must be a tuple of signals, .* not None"),
        ({"forward_signals": "SIGUSR1"}, TypeError, "forward_signals must be a tuple of signals, .* not 'SIGUSR1'"),
        ({"forward_signals": ["SIGUSR1"]}, TypeError, "forward_signals must have signals, such as .* not 'SIGUSR1'"),
        ({"forward_signals": (True,)}, TypeError, "forward_signals must have signals, .* not True"),
        ({"forward_signals": (0,)}, ValueError, "forward_signals may not have 0: no signal .* has this number"),
        ({"forward_signals": (999,)}, ValueError, "forward_signals may not have 999"),
        *(
            (
                {"forward_signals": {number}},
                ValueError,
                f"forward_signals may not have {name_signal(number)}: .*; leave it out",
            )
            for number in NOT_FORWARDED
        ),
    ],
)
def test_an_invalid_option_is_named(options, error, text):
    with pytest.raises(error, match=text):
        WorkerSpec(**{"fn": fn, "nprocs": 2} | options)
    with pytest.raises(error, match=text):
        mpwatch.run(**{"fn": fn, "nprocs": 2} | options)


@pytest.mark.parametrize(
    "env", [{"TOKEN": "s3cret"}, {"TOKEN": ["s3cret"]}, {"TOKEN": "s3cret\0"}, ["s3cret"], {"RANK": "s3cret"}]
)
def test_no_value_of_env_is_shown(env):
    try:
        shown = repr(WorkerSpec(fn=fn, nprocs=2, env=env))
    except (TypeError, ValueError) as error:
        shown = str(error)
    assert "s3cret" not in shown


def test_signals_may_be_numbers_and_are_listed_once():
    spec = WorkerSpec(fn=fn, nprocs=1, forward_signals=[signal.SIGUSR2, int(signal.SIGUSR2), signal.SIGRTMIN])
    assert spec.forward_signals == (signal.SIGUSR2, signal.SIGRTMIN)


def test_the_return_value_of_env_is_checked():
    with pytest.raises(TypeError, match=r"what env\(\) returned must be a mapping"):
        mpwatch.run(fn, 2, env=lambda worker: None)
    with pytest.raises(ValueError, match=r"what env\(\) returned may not set RANK"):
        mpwatch.run(fn, 2, env=lambda worker: {"RANK": "3"})


@pytest.mark.parametrize("bind", ["cores", "numa", lambda worker: {0}])
def test_binding_needs_a_system_that_can_do_it(monkeypatch, bind):
    cpus = os.cpu_count()
    monkeypatch.delattr(os, "sched_setaffinity")
    available = "This machine has CPU 0" if cpus == 1 else f"This machine has CPUs 0-{cpus - 1}"
    with pytest.raises(ValueError, match=f"bind=.* needs os.sched_setaffinity.*; leave bind out. {available}"):
        mpwatch.run(fn, 1, bind=bind)
    with pytest.raises(ValueError, match=r"bind=.* needs os\.sched_setaffinity"):
        mpwatch.WorkerGroup(1, bind=bind)


def test_check_is_a_bool():
    with pytest.raises(TypeError, match="check must be True or False, not 'no'"):
        mpwatch.run(fn, 1, check="no")


def test_main_has_no_option_check():
    with pytest.raises(TypeError, match="no option 'check'"):
        mpwatch.main(fn, 1, check=False)


def test_a_spec_is_validated_once_and_frozen():
    spec = WorkerSpec(fn=abs, nprocs="cpu", args=[1], kwargs=None)
    assert spec.nprocs == len(os.sched_getaffinity(0))
    assert spec.args == (1,)
    with pytest.raises(AttributeError):
        spec.nprocs = 3


def test_nprocs_auto_is_the_number_of_cpus_without_a_gpu():
    assert WorkerSpec(fn=fn).nprocs == len(os.sched_getaffinity(0))


def test_a_sync_function_may_run_a_coroutine():
    assert list(mpwatch.run(lambda: asyncio.run(asyncio.sleep(0, 5)), 1)) == [5]
