"""A script without a guard, whose functions run in ranks. It checks itself, and prints two lines."""

import argparse
import enum
import functools
import multiprocessing
import pickle
import sys
from dataclasses import dataclass
from typing import NamedTuple

import mpwatch

print("the top of the script runs", flush=True)


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int


@dataclass
class Cfg:
    lr: float
    colour: Colour = Colour.RED

    class Inner:
        pass

    def count(self):
        return counter


class TooBad(Exception):
    def __init__(self, code, *, why):
        super().__init__(why)
        self.code = code


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


@functools.cache
def cached(n):
    return n + counter


@dataclass(slots=True)
class Slotted:
    n: int

    def double(self):
        return Slotted(2 * self.n)


counter = 0
options = argparse.Namespace(lr=0.0)


def train(cfg):
    global counter
    counter += 1
    main = sys.modules["__main__"]
    assert main.counter == 1
    assert main.Cfg is type(cfg) is Cfg
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert pickle.loads(pickle.dumps(Colour.RED)) is Colour.RED
    assert pickle.loads(pickle.dumps(Cfg.Inner)) is Cfg.Inner
    assert pickle.loads(pickle.dumps(Point(1))) == Point(1)
    assert pickle.loads(pickle.dumps(even)) is even
    assert even(10)
    Cfg.changed = "in the rank"
    return cfg, options.lr, __name__, pickle.dumps(cfg)


def fail():
    raise TooBad(7, why="as it happens")


options.lr = 0.5
cfg = Cfg(0.1)
for value, lr, name, pickled in mpwatch.run(train, 2, args=(cfg,)):
    assert (type(value), value, value.colour) == (Cfg, cfg, Colour.RED)
    assert (lr, name) == (0.5, "__main__")
    assert pickle.loads(pickled) == cfg
assert counter == 0
assert not hasattr(Cfg, "changed")
assert Cfg.count.__globals__ is globals()
assert mpwatch.run(lambda: (odd, Cfg, Cfg.Inner, Colour.RED), 1)[0] == (odd, Cfg, Cfg.Inner, Colour.RED)
try:
    mpwatch.run(fail, 2)
except mpwatch.RunFailedError as error:
    cause = error.__cause__
assert (type(cause), cause.code) == (TooBad, 7)
assert mpwatch.run(cached, 1, args=(2,))[0] == 2
assert mpwatch.run(lambda one: (odd(3), cached(1), one.double()), 1, args=(Slotted(1),))[0] == (True, 1, Slotted(2))
assert multiprocessing.get_start_method(allow_none=True) is None


def relative():
    from . import near

    return near.VALUE


if __package__:
    assert mpwatch.run(relative, 1)[0] == 5
print("all is well")
