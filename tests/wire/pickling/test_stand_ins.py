"""An object that stands in for a module, and the module of a decorator, are the rank's own: they are sent by name."""

import pytest

from support.programs import python

MODULES = {
    # the module replaces itself by an instance of its own class
    "settings.py": """
import sys, threading

class Settings:
    lock = threading.Lock()
    rate = 1

sys.modules[__name__] = Settings()
""",
    # the module replaces itself by a module whose attributes exist when they are first read
    "lazy.py": """
import sys, threading, types

class Namespace(types.ModuleType):
    lock = threading.Lock()

class Lazy(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        setattr(self, name, Namespace(f"{self.__name__}.{name}"))
        return getattr(self, name)

sys.modules[__name__] = Lazy(__name__)
""",
    "decorators.py": """
import functools, threading

lock = threading.Lock()
calls = 0

def locked(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        global calls
        with lock:
            calls += 1
            return fn(*args)
    return wrapper
""",
}

BY_NAME = """
import sys
import decorators, lazy, settings
import mpwatch

settings.rate = 2  # the state of this process
reached = lazy.reached
sys.modules["left.out"] = None

@decorators.locked
def double(x):
    return 2 * x

def work(*things):
    assert settings is sys.modules["settings"] is things[0] and settings.rate == 1
    assert lazy is sys.modules["lazy"] is things[1] and lazy.reached is reached is things[2]
    assert double(2) + double(3) == 10 and decorators.calls == 2
    return things

things = settings, lazy, reached
back, = mpwatch.run(work, 1, args=things)
assert all(map(lambda a, b: a is b, back, things))
print("done")
"""

FROM_SCRIPT = """
import sys, types
import mpwatch

class Wandb(types.ModuleType):
    def __getattr__(self, name):
        return print

sys.modules["wandb"] = wandb = Wandb("wandb")

def train():
    wandb.log({})

mpwatch.run(train, 1)
"""

BY_VALUE = """
import contextlib, sys
import cloudpickle, decorators
import mpwatch

@decorators.locked
def work():
    return "decorators" in sys.modules

decorators.lock, decorators.unused = contextlib.nullcontext(), decorators.lock
cloudpickle.register_pickle_by_value(decorators)
print(*mpwatch.run(work, 1))
"""


@pytest.fixture
def run_script(tmp_path):
    for name, source in MODULES.items():
        (tmp_path / name).write_text(source)

    def run(source):
        (tmp_path / "script.py").write_text(source)
        return python(str(tmp_path / "script.py"), check=False)

    return run


def test_a_stand_in_and_the_module_of_a_decorator_are_those_of_the_rank(run_script):
    done = run_script(BY_NAME)
    assert done.stdout == "done\n", done.stderr


def test_a_stand_in_that_the_script_has_made_is_named(run_script):
    assert "fn 'train' uses the global 'wandb', a __main__.Wandb, which cannot be sent" in run_script(FROM_SCRIPT).stderr


def test_a_decorator_of_a_module_that_is_sent_by_value(run_script):
    done = run_script(BY_VALUE)
    assert done.stdout == "False\n", done.stderr
