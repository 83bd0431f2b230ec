"""The caller's `__main__` in a rank, for each way to run a program."""

import os
import pty
import subprocess
import sys

import pytest

from support.programs import ENV, python

SCRIPT = """
import argparse, enum, functools, multiprocessing, pickle, sys
from dataclasses import dataclass
from typing import NamedTuple

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

@functools.lru_cache(maxsize=7)
def cached(n):
    return n + counter

class Outer:
    class Inner:
        def value(self):
            return helper()
    def other(self):
        return helper(), Other

class Other:
    pass

@dataclass(slots=True)
class Slotted:
    n: int

class Private:
    __slots__ = ("__x", "y")
    def __init__(self):
        self.__x = self.y = 3
    def get(self):
        return self.__x

def slotted(one, two):
    one.n += 1
    return one, two, two.get()

def helper():
    return 5

def rebind(cfg):
    global Cfg
    class Cfg:
        x = 5
    return Cfg()

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

import mpwatch
options.lr = 0.5
cfg = Cfg(0.1)
for value, lr, name, pickled in mpwatch.run(train, 2, args=(cfg,)):
    assert type(value) is Cfg and value == cfg and value.colour is Colour.RED
    assert (lr, name) == (0.5, "__main__")
    assert pickle.loads(pickled) == cfg
assert counter == 0
assert not hasattr(Cfg, "changed")
assert Cfg.count.__globals__ is globals()
assert mpwatch.run(lambda: (odd, Cfg, Cfg.Inner, Colour.RED), 1)[0] == (odd, Cfg, Cfg.Inner, Colour.RED)
try:
    mpwatch.run(fail, 2)
except mpwatch.RunFailedError as error:
    try:
        raise error.__cause__
    except TooBad as caught:
        assert caught.code == 7
assert mpwatch.run(lambda: odd(3), 1)[0]
assert mpwatch.run(lambda: (cached(1), cached.cache_parameters()["maxsize"]), 1)[0] == (1, 7)
assert mpwatch.run(cached, 1, args=(2,))[0] == 2
assert mpwatch.run(lambda f: (f, pickle.loads(pickle.dumps(f)) is f), 1, args=(cached,))[0] == (cached, True)
assert mpwatch.run(lambda inner, cfg: inner.value(), 1, args=(Outer.Inner(), cfg))[0] == 5
one, two, got = mpwatch.run(slotted, 1, args=(Slotted(1), Private()))[0]
assert (type(one), one.n, type(two), two.y, two.get(), got) == (Slotted, 2, Private, 3, 3, 3)
other = mpwatch.run(rebind, 1, args=(cfg,))[0]
assert other.x == 5 and type(other) is not Cfg
assert multiprocessing.get_start_method(allow_none=True) is None
print("all is well")
"""
EXPECTED = "the top of the script runs\nall is well\n"


def test_a_script_without_a_guard(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert python("script.py", cwd=tmp_path).stdout == EXPECTED


def test_a_module_of_a_package(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "near.py").write_text("VALUE = 5\n")
    more = "def relative():\n    from . import near\n    return near.VALUE\nassert mpwatch.run(relative, 1)[0] == 5\n"
    (tmp_path / "package" / "program.py").write_text(SCRIPT + more)
    assert python("-m", "package.program", cwd=tmp_path).stdout == EXPECTED


def test_python_c():
    assert python("-c", SCRIPT).stdout == EXPECTED


def test_a_program_on_stdin():
    assert python("-", program=SCRIPT).stdout == EXPECTED


def test_an_interactive_session():
    lines = ["import mpwatch", "def f():", "    return 41 + one", "", "one = 1", "print('got', list(mpwatch.run(f, 2)))"]
    controller, terminal = pty.openpty()
    try:
        session = subprocess.Popen(
            [sys.executable, "-q", "-i"],
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=ENV,
            text=True,
        )
        os.write(controller, "".join(f"{line}\n" for line in [*lines, "exit()"]).encode())
        out, _ = session.communicate(timeout=60)
    finally:
        os.close(controller)
        os.close(terminal)
    assert "got [42, 42]" in out


def test_a_run_in_a_daemonic_process_is_explained(tmp_path):
    (tmp_path / "program.py").write_text(
        "import multiprocessing, mpwatch\n"
        "def f(): mpwatch.run(print, 1)\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('fork').Process(target=f, daemon=True)\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    err = python("program.py", cwd=tmp_path).stderr
    assert "LaunchError: rank 0 could not be started" in err
    assert "start the run in a process that is not daemonic" in err


WORKERS = """
import multiprocessing, sys
import mpwatch

class Item:
    def __init__(self, n):
        self.n = n

def square(item):
    return Item(item.n ** 2)

def work(method):
    with multiprocessing.get_context(method).Pool(2) as pool:
        return [item.n for item in pool.map(square, [Item(2), Item(3)])]

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        assert list(mpwatch.run(work, 2, args=(method,))) == [[4, 9], [4, 9]], method
    multiprocessing.set_start_method("forkserver")
    assert mpwatch.run(multiprocessing.get_start_method, 1)[0] == "forkserver"
"""


@pytest.mark.parametrize("way", ["script", "module"])
def test_processes_of_a_rank_find_the_classes_of_the_script(tmp_path, way):
    (tmp_path / "program.py").write_text(WORKERS)
    python(*(["program.py"] if way == "script" else ["-m", "program"]), cwd=tmp_path)


def test_a_run_while_main_is_imported_again_is_explained(tmp_path):
    (tmp_path / "program.py").write_text(
        "import multiprocessing, mpwatch\n"
        "def f(): pass\n"
        "mpwatch.run(f, 1)\n"
        "child = multiprocessing.get_context('spawn').Process(target=f)\n"
        "child.start()\n"
        "child.join()\n"
    )
    err = python("program.py", cwd=tmp_path).stderr
    assert "RuntimeError: mpwatch was called while __main__ is being imported again" in err
    assert 'if __name__ == "__main__":' in err
