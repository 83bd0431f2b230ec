"""Invalid options are refused before a rank is started, and the error names the option and its value."""

import functools
import inspect
import math
import os
import pickle
import re
import signal
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction
from inspect import cleandoc
from typing import get_type_hints

import numpy as np
import pytest

import mpwatch
from mpwatch import FailureKind, LogSpec, Placement, Rendezvous, RestartPolicy, StopPolicy, WorkerSpec, events

with suppress(ImportError):
    import torch  # noqa: F401  the check of the backend imports it, which changes copyreg


def fn():
    pass


async def coroutine():
    pass


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"nprocs": 0}, ValueError, "nprocs must be at least 1, not 0"),
        ({"fn": coroutine}, TypeError, "'coroutine' is async def"),
        ({"args": "ab"}, TypeError, "args must be a sequence .* not 'ab'"),
        ({"kwargs": [1]}, TypeError, r"kwargs must be a mapping .* not \[1\]"),
        ({"backend": "glo"}, ValueError, "torch has no such backend; there are .*gloo, mpi, nccl"),
        ({"nprocs": "gpus"}, ValueError, "nprocs must be a number of ranks, 'gpu', 'cpu' or 'auto', not 'gpus'"),
        ({"env": "A=1"}, TypeError, "env must be a mapping .* not a value of type str$"),
        ({"env": {"A": 1}}, TypeError, "env must map strings to strings; 'A' has a value of type int$"),
        ({"env": {"RANK": "1"}}, ValueError, "env may not set RANK: it identifies the rank, so mpwatch sets it$"),
        ({"timeout": -1}, ValueError, "timeout must be a number of seconds, more than 0, not -1"),
        ({"grace_period": math.nan}, ValueError, "grace_period .* not nan"),
        ({"placement": "core"}, ValueError, "Placement: cpus must be 'cores', 'numa', a function .* or None, not 'core'"),
        ({"debug": "all"}, ValueError, "debug must be 'locals', 'post_mortem' or None, not 'all'"),
        ({"stop": {signal.SIGKILL}}, ValueError, "stop may not have SIGKILL: no program can handle it; leave it out"),
        ({"max_restarts": -1}, ValueError, "max_restarts must be at least 0, not -1"),
        (
            {"max_restarts": RestartPolicy(scope="worker"), "backend": "gloo"},
            ValueError,
            r"RestartPolicy\(scope='worker'\) is for ranks that do not communicate, but backend='gloo' makes a process group",
        ),
        ({"keep_going": True, "backend": "gloo"}, ValueError, "keep_going=True is for ranks that do not communicate"),
        (
            {"on_event": coroutine},
            TypeError,
            "on_event must be an ordinary function; 'coroutine' is async def, which mpwatch",
        ),
        ({"stop": [99]}, ValueError, "stop may not have 99: no signal of this system has this number"),
        ({"on_event": events.JsonLines}, TypeError, "on_event must be a function .* not <class '.*JsonLines'>"),
        ({"logs": "folder"}, TypeError, r"logs must be a LogSpec, such as LogSpec\('folder'\), or None, not 'folder'"),
        ({"logs": LogSpec(show=2)}, ValueError, "logs: show names rank 2, but nprocs=2: ranks are 0 to 1"),
        ({"rendezvous": "node0:29400"}, TypeError, "rendezvous must be a Rendezvous, such as"),
        (
            {"max_restarts": RestartPolicy(scope="worker"), "rendezvous": Rendezvous("node0:29400", "job", 2)},
            ValueError,
            "all ranks are restarted together",
        ),
    ],
)
def test_an_invalid_option_is_named(options, error, text):
    options = {"fn": fn, "nprocs": 2} | options
    for function in (WorkerSpec, mpwatch.run):
        with pytest.raises(error, match=text):
            function(**options)


RETRY_IF = "retry_if must be exception types, FailureKinds, a collection of them, or a function that takes a ProcessFailure"


@pytest.mark.parametrize(
    ("cls", "options", "error", "text"),
    [
        (RestartPolicy, {"scope": "rank"}, ValueError, "scope must be 'group' or 'worker', not 'rank'"),
        (RestartPolicy, {"jitter": 1.01}, ValueError, r"jitter must be a number from 0 to 1, not 1\.01"),
        (RestartPolicy, {"retry_if": "ValueError"}, TypeError, f"{RETRY_IF}, not 'ValueError'"),
        (RestartPolicy, {"max_no_progress": 0}, ValueError, "max_no_progress must be at least 1, not 0"),
        (StopPolicy, {"after": 0}, ValueError, "StopPolicy: after must be a number of seconds, more than 0"),
        (Placement, {"gpus": "all"}, ValueError, "Placement: gpus must be 'own' or None, not 'all'"),
        (LogSpec, {"show": {"stdin": "all"}}, ValueError, "logs: show may have the keys 'stdout' and 'stderr', not 'stdin'"),
        (LogSpec, {"dir": "logs", "show": "inherit"}, ValueError, "logs: show='inherit' gives the ranks the caller's own"),
        (LogSpec, {"stdout": 3}, TypeError, "logs: stdout must have a method `write` for text, not 3"),
        (LogSpec, {"prefix": "{pid}"}, ValueError, "prefix may have the fields {rank}, {local_rank}, .*no field 'pid'"),
        (LogSpec, {"prefix": "a\n"}, ValueError, "logs: prefix must be a part of a line"),
        (Rendezvous, {"endpoint": "node0:http"}, ValueError, "endpoint must be host:port, .* not 'node0:http'"),
        (Rendezvous, {"run_id": "../x"}, ValueError, "run_id also names the folder of logs, and cannot be '../x'"),
        (Rendezvous, {"nnodes": (3, 2)}, ValueError, r"nnodes \(max\) must be at least 3, not 2"),
        (
            Rendezvous,
            {"last_call_timeout": -1},
            ValueError,
            "last_call_timeout must be a number of seconds, 0 or more, not -1",
        ),
        (Rendezvous, {"node_timeout": 1}, ValueError, "node_timeout must be at least 2 seconds, not 1"),
        (Rendezvous, {"secret": ""}, ValueError, "secret must not be empty"),
    ],
)
def test_an_invalid_part_of_an_option_is_named(cls, options, error, text):
    needed = {"endpoint": "node0:29400", "run_id": "job", "nnodes": 2} if cls is Rendezvous else {}
    with pytest.raises(error, match=text):
        cls(**needed | options)


def test_the_secret_of_a_rendezvous_can_come_from_the_environment_and_is_never_shown(monkeypatch):
    monkeypatch.setenv("MPWATCH_SECRET", "open sesame")
    rendezvous = Rendezvous("node0:29400", "job", 2, is_host=True)
    assert rendezvous.key == b"open sesame"
    assert replace(rendezvous, secret="another").key == b"another"
    assert "sesame" not in repr(rendezvous)
    assert pickle.loads(pickle.dumps(rendezvous)).is_host


@pytest.mark.parametrize(
    "env", [{"TOKEN": "s3cret"}, {"TOKEN": ["s3cret"]}, {"TOKEN": "s3cret\0"}, ["s3cret"], {"RANK": "s3cret"}]
)
def test_no_value_of_env_is_shown(env):
    try:
        shown = repr(WorkerSpec(fn=fn, nprocs=2, env=env))
    except (TypeError, ValueError) as error:
        shown = str(error)
    assert "s3cret" not in shown


@pytest.mark.parametrize(
    ("env", "error", "text"), [(None, TypeError, "must be a mapping"), ({"RANK": "3"}, ValueError, "may not set RANK")]
)
def test_the_return_value_of_env_is_checked(env, error, text):
    with pytest.raises(error, match=rf"what env\(\) returned {text}"):
        mpwatch.run(fn, 2, env=lambda worker: env)


def train(lr, *, epochs=1):
    pass


class Model:
    def fit(self, data):
        pass


def inject_config(function):
    @functools.wraps(function)
    def wrapper():
        return function({"lr": 1})

    return wrapper


@inject_config
def configured(config):
    pass


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "text"),
    [
        (train, [(0,), (1,)], None, r"fn train\(lr, \*, epochs=1\) cannot be called .*: too many positional arguments"),
        (train, (), None, "missing a required argument: 'lr'"),
        (train, (1,), {"epoch": 2}, "got an unexpected keyword argument 'epoch'"),
        (functools.partial(train, 1), (2,), None, "fn train.*too many positional arguments"),
        (Model().fit, (), None, r"fn Model\.fit\(data\) cannot be called .*'data'"),
        (configured, (1,), None, "too many"),
    ],
)
def test_arguments_that_do_not_fit_the_function_are_refused(function, args, kwargs, text):
    with pytest.raises(TypeError, match=text) as caught:
        mpwatch.run(function, 2, args=args, kwargs=kwargs)
    assert "PerRank([a, b])" in str(caught.value)


def test_arguments_that_fit_the_function_are_accepted():
    WorkerSpec(fn=Model().fit, nprocs=1, args=(1,))
    WorkerSpec(fn=configured, nprocs=1)  # though the function in it takes an argument
    WorkerSpec(fn=dict, nprocs=1, kwargs={"a": 1})  # it has no signature


def test_run_submit_and_main_need_a_number_of_ranks_or_a_spec_which_is_a_whole_call():
    spec = WorkerSpec(fn=os.getpid, nprocs=2)
    assert len(set(mpwatch.run(spec))) == len(set(mpwatch.submit(spec).result())) == len(set(mpwatch.main(spec))) == 2
    for function in (mpwatch.run, mpwatch.submit, mpwatch.main):
        needs = rf"{function.__name__}\(\) needs nprocs: a number of ranks, 'gpu', 'cpu' or 'auto'"
        with pytest.raises(TypeError, match=needs):
            function(fn)
        with pytest.raises(TypeError, match=r"pass dataclasses.replace\(spec, ...\) to change nprocs, timeout"):
            function(spec, 3, timeout=3.0)


def test_specs_and_policies_are_frozen_and_take_numbers_of_any_type():
    spec = WorkerSpec(fn=abs, nprocs="cpu", args=[1], kwargs=None, max_restarts=2)
    assert spec.nprocs == WorkerSpec(fn=fn, nprocs="auto").nprocs == len(os.sched_getaffinity(0))
    assert spec.args == (1,)
    assert spec.max_restarts == replace(spec, nprocs=3).max_restarts == RestartPolicy(2)
    policy = RestartPolicy(np.int64(2), delay=np.float32(0.5), jitter=Fraction(1, 2), retry_if={ValueError, FailureKind.OOM})
    for frozen in (spec, policy):
        with pytest.raises(FrozenInstanceError):
            frozen.nprocs = 3
    assert type(policy.max_restarts) is int
    assert pickle.loads(pickle.dumps(policy)) == policy
    with pytest.raises(TypeError):
        RestartPolicy(5, "worker")


def test_the_typed_options_are_those_of_run_and_of_a_spec_and_all_are_described():
    parameters = inspect.signature(mpwatch.run).parameters
    assert {"fn", "nprocs", *get_type_hints(mpwatch.RunOptions)} == set(parameters)
    options = {field.name: field.default for field in fields(WorkerSpec) if field.init}
    assert set(options) == set(parameters) - {"check"}
    assert all(parameters[name].default == options[name] for name in set(options) - {"fn", "nprocs"})
    assert set(parameters) <= set(re.findall(r"^    (\w+): ", cleandoc(mpwatch.run.__doc__), re.MULTILINE))


@pytest.mark.parametrize(
    ("function", "option", "hint"),
    [
        (lambda **options: mpwatch.map(print, [], 2, **options), "chunk_size", "; did you mean 'chunksize'?"),
        (lambda **options: mpwatch.WorkerGroup(2, **options), "graceperiod", "; did you mean 'grace_period'?"),
        (lambda **options: mpwatch.submit(fn, 2, **options), "epochs", ""),
    ],
)
def test_an_unknown_option_is_named_with_the_one_that_may_be_meant(function, option, hint):
    with pytest.raises(TypeError, match=rf"\(\) has no option '{option}'{re.escape(hint)}$"):
        function(**{option: 1})
