"""The errors for invalid options name the option and its value."""

import asyncio
import functools
import inspect
import math
import os
import signal
from dataclasses import fields
from typing import get_type_hints

import pytest

import mpwatch
from mpwatch import WorkerSpec
from mpwatch.options.validation import RESERVED_SIGNALS
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
        ({"backend": 3}, TypeError, "backend must be a string, a Backend or None, not 3"),
        ({"backend": ""}, ValueError, "backend must name a backend"),
        ({"env": "A=1"}, TypeError, "env must be a mapping .* not a value of type str$"),
        ({"env": {"A": 1}}, TypeError, "env must map strings to strings; 'A' has a value of type int$"),
        ({"env": {"A=B": "1"}}, ValueError, "env has a variable that no environment can hold: 'A=B'$"),
        ({"env": {"A": "\0"}}, ValueError, "no environment can hold"),
        ({"env": {"RANK": "1"}}, ValueError, "env may not set RANK: it identifies the rank, so mpwatch sets it$"),
        ({"env": {"MASTER_PORT": "http"}}, ValueError, "must give MASTER_PORT as a TCP port, a number from 1 to 65535$"),
        ({"env": {"A": "\ud800"}}, ValueError, "cannot be encoded: 'A'$"),
        ({"timeout": -1}, ValueError, "timeout must be a number of seconds, more than 0, not -1"),
        ({"timeout": 0}, ValueError, "timeout .* not 0"),
        ({"timeout": math.inf}, ValueError, "timeout .* not inf"),
        ({"timeout": "5"}, TypeError, "timeout must be a number of seconds, not '5'"),
        ({"grace_period": math.nan}, ValueError, "grace_period .* not nan"),
        ({"grace_period": -0.1}, ValueError, "grace_period .* 0 or more, not -0.1"),
        ({"grace_period": None}, TypeError, "grace_period must be a number of seconds, not None"),
        ({"placement": "core"}, ValueError, "Placement: cpus must be 'cores', 'numa', a function .* or None, not 'core'"),
        ({"placement": {0, 1}}, TypeError, "Placement: cpus must be 'cores', 'numa', a function from Worker .* not {0, 1}"),
        ({"placement": True}, TypeError, "Placement: cpus must be .* not True"),
        ({"placement": set}, TypeError, "Placement: cpus must be .* not <class 'set'>"),
        ({"placement": coroutine}, TypeError, "Placement: cpus must be an ordinary function; 'coroutine' is async def"),
        ({"debug": "all"}, ValueError, "debug must be 'locals', 'post_mortem' or None, not 'all'"),
        ({"debug": True}, TypeError, "debug must be 'locals', .* not True"),
        ({"stop": signal.SIGUSR1}, TypeError, r"stop must be a tuple .*\(signal.SIGUSR1,\), not <Sig"),
        ({"stop": "SIGUSR1"}, TypeError, "stop must be a tuple of signals, .* not 'SIGUSR1'"),
        ({"stop": ["SIGUSR1"]}, TypeError, "stop must have signals, such as .* not 'SIGUSR1'"),
        ({"stop": (True,)}, TypeError, "stop must have signals, .* not True"),
        ({"stop": (0,)}, ValueError, "stop may not have 0: no signal .* has this number"),
        ({"stop": (999,)}, ValueError, "stop may not have 999"),
        ({"max_restarts": "3"}, TypeError, "max_restarts must be an int, not '3'"),
        ({"on_progress": 3}, TypeError, "on_progress must be a function that takes an Event"),
        *(
            ({"stop": {number}}, ValueError, f"stop may not have {name_signal(number)}: .*; leave it out")
            for number in RESERVED_SIGNALS
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
    spec = WorkerSpec(fn=fn, nprocs=1, stop=[signal.SIGUSR2, int(signal.SIGUSR2), signal.SIGRTMIN])
    assert spec.stop.signals == (signal.SIGUSR2, signal.SIGRTMIN)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"after": 0}, ValueError, "StopPolicy: after must be a number of seconds, more than 0"),
        ({"after": "1"}, TypeError, "StopPolicy: after must be a number of seconds"),
        ({"timeout": -1}, ValueError, "StopPolicy: timeout must be a number of seconds, more than 0"),
    ],
)
def test_an_invalid_limit_of_a_stop_is_named(options, error, text):
    with pytest.raises(error, match=text):
        mpwatch.StopPolicy(**options)


def test_gpus_are_own_or_all():
    with pytest.raises(ValueError, match="Placement: gpus must be 'own' or None, not 'all'"):
        mpwatch.Placement(gpus="all")


@pytest.mark.parametrize(("text", "error"), [("soon", TypeError), ("0", ValueError), ("inf", ValueError)])
def test_an_invalid_start_timeout_is_named(monkeypatch, text, error):
    monkeypatch.setenv("MPWATCH_START_TIMEOUT", text)
    with pytest.raises(error, match="the variable MPWATCH_START_TIMEOUT must be a number of seconds"):
        mpwatch.run(fn, 1)


def test_the_number_of_ranks_has_no_default():
    for function in (mpwatch.run, mpwatch.submit, mpwatch.main):
        with pytest.raises(
            TypeError, match=rf"{function.__name__}\(\) needs nprocs: a number of ranks, 'gpu', 'cpu' or 'auto'"
        ):
            function(fn)


def test_a_spec_is_a_whole_call():
    spec = WorkerSpec(fn=os.getpid, nprocs=2)
    assert len(set(mpwatch.run(spec))) == len(set(mpwatch.submit(spec).result())) == len(set(mpwatch.main(spec))) == 2
    for function in (mpwatch.run, mpwatch.submit, mpwatch.main):
        with pytest.raises(TypeError, match=r"pass dataclasses.replace\(spec, ...\) to change nprocs, timeout"):
            function(spec, 3, timeout=3.0)


def test_the_typed_options_are_those_of_run():
    parameters = inspect.signature(mpwatch.run).parameters
    assert len(parameters) <= 20
    assert {"fn", "nprocs", *get_type_hints(mpwatch.RunOptions)} == set(parameters)
    spec = WorkerSpec(fn=fn, nprocs=1)
    assert {field.name for field in fields(spec) if field.init} == set(parameters) - {"check"}
    defaults = {field.name: field.default for field in fields(spec)}
    assert all(parameters[name].default == defaults[name] for name in set(parameters) - {"fn", "nprocs", "check"})


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
    with pytest.raises(ValueError, match=f"cpus=.* needs os.sched_setaffinity.*; leave it out. {available}"):
        mpwatch.run(fn, 1, placement=bind)
    with pytest.raises(ValueError, match=r"cpus=.* needs os\.sched_setaffinity"):
        mpwatch.WorkerGroup(1, placement=bind)


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
    assert WorkerSpec(fn=fn, nprocs="auto").nprocs == len(os.sched_getaffinity(0))


def test_a_sync_function_may_run_a_coroutine():
    assert list(mpwatch.run(lambda: asyncio.run(asyncio.sleep(0, 5)), 1)) == [5]
