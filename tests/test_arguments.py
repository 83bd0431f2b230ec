"""What is sent to ranks and back: large data is not copied, a refusal names the part, and with PerRank each rank gets its own."""

import contextvars
import functools
import multiprocessing
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import mpwatch
from mpwatch import PerRank
from support import functions
from support.process_state import descriptors
from support.programs import python

LARGE = 1 << 20  # bytes; such data is in memory that is mapped
lock = threading.Lock()


def list_mappings():
    return re.findall(r".*[:/]mpwatch-\S+ \(deleted\)$", Path("/proc/self/maps").read_text(), re.MULTILINE)


# --- Large data


def write_rank(array, barrier):
    array[:] = functions.rank()
    barrier.wait()
    links = [link for link in Path("/proc/self/fd").iterdir() if "mpwatch-call" in os.path.realpath(link)]
    return set(array.tolist()), {line.split()[4] for line in list_mappings() if "mpwatch-call" in line}, links


def test_each_rank_may_write_to_its_own_view_of_the_same_memory(barrier):
    array = np.full(LARGE // 8, 7.0)
    values, inodes, links = zip(*mpwatch.run(write_rank, 3, args=(array, barrier)), strict=True)
    assert (list(values), set(array)) == ([{0.0}, {1.0}, {2.0}], {7.0})
    assert len(set.union(*inodes)) == 1
    assert not any(links)


@pytest.mark.parametrize(("size", "mappings"), [(LARGE, 3), (1 << 16, 0)])  # a process may have only 65,530 mappings
def test_results_are_the_callers_to_write_to_and_hold_memory_only_as_long_as_they_live(size, mappings):
    before, open_before = list_mappings(), descriptors()
    result = mpwatch.run(functools.partial(np.full, size // 8), 3, args=(1.5,))
    assert descriptors() == open_before
    first, second, third = result
    first[:] = 0
    assert set(second) == {1.5}
    assert len(list_mappings()) == len(before) + mappings
    del result, first, second
    assert third[5] == 1.5
    del third
    assert list_mappings() == before


MEMORY = """
import functools, re, sys
import mpwatch, numpy
def most():
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) >> 10
array = numpy.ones(100 << 17)
for fn, args in ((len, (array,)), (functools.partial(numpy.ones, 100 << 17), ())):
    before = most()
    values = list(mpwatch.run(fn, 2, args=args))
    print(most() - before)
"""


def test_neither_arguments_nor_results_of_100_mb_pass_through_the_watchers_heap():
    arguments, results = map(int, python("-c", MEMORY).stdout.split())
    assert arguments < 20
    assert results < 20


# --- What a script defines

CHANGING_GLOBALS = """
from mpwatch import WorkerGroup

n = 1

def get():
    return n

class Thing:
    pass

def make():
    return Thing()

with WorkerGroup(1) as group:
    print(*group.run(get))
    n = 2
    print(*group.run(get))

    def get():
        return -n

    print(*group.run(get), {type(thing) for thing in group.run(make)} == {Thing})
"""


def test_globals_have_their_values_at_the_time_of_the_call():
    assert python("-c", CHANGING_GLOBALS).stdout == "1\n2\n-2 True\n"


def test_a_return_value_does_not_change_the_callers_classes():
    class Config:
        total = 1

        def bump(self):
            return Config.total

    def change():
        Config.total = 99
        return Config()

    bump = Config.bump
    (back,) = mpwatch.run(change, 1)
    assert type(back) is Config
    assert (Config.total, Config.bump, back.bump()) == (1, bump, 1)


# --- Objects that stand in for a module are sent by name, since a rank has its own

MODULES = {
    "settings.py": """
import sys, threading

class Settings:
    lock = threading.Lock()
    rate = 1

sys.modules[__name__] = Settings()
""",
    # the attributes of this module exist when they are first read
    "lazy.py": """
import sys, threading, types

class Lazy(types.ModuleType):
    lock = threading.Lock()

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        setattr(self, name, Lazy(f"{self.__name__}.{name}"))
        return getattr(self, name)

sys.modules[__name__] = Lazy(__name__)
""",
}

BY_NAME = """
import sys
import lazy, settings
import mpwatch

settings.rate = 2  # the state of this process
reached = lazy.reached

def work(*things):
    assert settings is sys.modules["settings"] is things[0] and settings.rate == 1
    assert lazy is sys.modules["lazy"] is things[1] and lazy.reached is reached is things[2]
    return things

things = settings, lazy, reached
back, = mpwatch.run(work, 1, args=things)
assert all(map(lambda a, b: a is b, back, things))
print("done")
"""

MADE_BY_THE_SCRIPT = """
import sys, types
import mpwatch

class Wandb(types.ModuleType):
    def __getattr__(self, name):
        return print

sys.modules["wandb"] = wandb = Wandb("wandb")

def train():
    wandb.log({})

try:
    mpwatch.run(train, 1)
except mpwatch.LaunchError as error:
    print(str(error).partition(", which")[0])
"""


@pytest.mark.parametrize(
    ("script", "output"),
    [(BY_NAME, "done"), (MADE_BY_THE_SCRIPT, "fn 'train' uses the global 'wandb', a __main__.Wandb")],
    ids=["a module replaces itself", "the script makes it"],
)
def test_an_object_that_stands_in_for_a_module(script, output, tmp_path):
    for name, source in {**MODULES, "script.py": script}.items():
        (tmp_path / name).write_text(source)
    assert python(str(tmp_path / "script.py")).stdout == f"{output}\n"


# --- What cannot be sent


class Holder:
    def __init__(self, thing):
        self.thing = thing

    def method(self):
        pass


def make_user(thing):
    def train():
        return thing

    return train


def make_class():
    class Trainer:
        held = lock

    return Trainer


class Local(threading.local):
    pass


REASON = r"which cannot be sent to the ranks \(TypeError: cannot pickle '_thread.lock' object\)"


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "text"),
    [
        (make_user([1, {"a": lock}]), (), {}, r"fn '.*train' closes over 'thing'\[1\]\['a'\], a _thread.lock"),
        (print, (make_class(),), {}, rf"args\[0\].held is a _thread.lock, {REASON}"),
        (print, (make_class()(),), {}, rf"args\[0\].__class__.held is a _thread.lock, {REASON}"),
        (print, (contextvars.ContextVar("name"),), {}, r"args\[0\] is a _contextvars.ContextVar"),
        (print, (Local(),), {}, r"args\[0\] is a test_arguments.Local"),
        (functools.partial(print, lock), (), {}, r"fn 'print'.args\[0\], a _thread.lock"),
        (Holder(lock).method, (), {}, "fn 'Holder.method', a method of Holder: self.thing, a _thread.lock"),
        (print, (1, Holder(lock)), {}, r"args\[1\].thing is a _thread.lock"),
        (dict, (), {"cfg": {"x": (lock,)}}, r"kwargs\['cfg'\]\['x'\]\[0\] is a _thread.lock"),
        (print, ((n for n in ()),), {}, r"args\[0\] is a builtins.generator"),
    ],
)
def test_the_part_that_cannot_be_sent_is_named_before_a_rank_starts(fn, args, kwargs, text):
    with pytest.raises(mpwatch.LaunchError, match=text) as caught:
        mpwatch.run(fn, 2, args=args, kwargs=kwargs)
    assert "create it inside the function" in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_call_that_cannot_be_sent_leaves_no_descriptor():
    """The connection's descriptor is duplicated before the lock fails to pickle. The leak check looks for the duplicate."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with ours, theirs, pytest.raises(mpwatch.LaunchError, match=r"args\[1\]"):
        mpwatch.run(print, 2, args=(theirs, lock))


# --- PerRank


def get_arguments(*args, **kwargs):
    return functions.rank(), mpwatch.current_worker().restart_count, args, kwargs


def get_arguments_at_the_second_attempt(*args, **kwargs):
    if functions.rank() == 1 and mpwatch.current_worker().restart_count == 0:
        raise RuntimeError("first attempt")
    return get_arguments(*args, **kwargs)


def test_each_rank_gets_its_own_value_also_when_it_is_restarted():
    args, kwargs = (PerRank(range(2)), "all", PerRank("abc"[rank] for rank in range(2))), {"x": PerRank([7, 8])}
    result = mpwatch.run(get_arguments_at_the_second_attempt, 2, args=args, kwargs=kwargs, max_restarts=1)
    assert list(result) == [(rank, 1, (rank, "all", "abc"[rank]), {"x": 7 + rank}) for rank in range(2)]


def test_each_call_of_a_group_has_its_own_values():
    with mpwatch.WorkerGroup(2) as group:
        for number in range(2):
            result = group.run(functions.double, (PerRank([number, number + 10]),), {"plus": PerRank([0, 1])})
            assert list(result) == [2 * number, 2 * number + 21]
        with pytest.raises(ValueError, match=r"^kwargs\['plus'\] is a PerRank of 3 values, but there are 2 ranks$"):
            group.run(functions.double, (1,), {"plus": PerRank([1, 2, 3])})
        with pytest.raises(mpwatch.LaunchError, match=r"^args\[0\].values\[1\]\['lock'\] is a .*lock, which cannot be sent"):
            group.run(functions.double, (PerRank([1, {"lock": threading.Lock()}]),))
        assert list(group.run(functions.double, (1,))) == [2, 2]


@pytest.mark.parametrize(
    ("values", "error"),
    [("ab", r"^PerRank needs one value for each rank, such as PerRank\(\[a, b\]\), not 'ab'$"), (3, "not 3$")],
)
def test_what_has_no_value_for_each_rank_is_refused(values, error):
    with pytest.raises(TypeError, match=error):
        PerRank(values)


@pytest.mark.parametrize("value", [[PerRank([1, 2])], PerRank([1, PerRank([1, 2])])])
def test_a_per_rank_in_an_argument_is_refused(value):
    with pytest.raises(mpwatch.LaunchError, match=r"^args\[0\].* a PerRank must itself be one of args or kwargs"):
        mpwatch.run(functions.double, 2, args=(value,))
