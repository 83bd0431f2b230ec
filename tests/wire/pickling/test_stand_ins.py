"""An object that stands in for a module is the rank's own: it is sent by name."""

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
import functools

rate = 1

def scaled(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return rate * fn(*args)
    return wrapper
""",
}

BY_NAME = """
import sys
import lazy, settings
import mpwatch

settings.rate = 2  # the state of this process
reached = lazy.reached
sys.modules["left.out"] = None

def work(*things):
    assert settings is sys.modules["settings"] is things[0] and settings.rate == 1
    assert lazy is sys.modules["lazy"] is things[1] and lazy.reached is reached is things[2]
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

DECORATED = """
import decorators
import mpwatch

decorators.rate = 2  # as a function that the script calls to set it up does

@decorators.scaled
def work():
    return 3

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


def test_a_stand_in_is_that_of_the_rank(run_script):
    done = run_script(BY_NAME)
    assert done.stdout == "done\n", done.stderr


def test_a_stand_in_that_the_script_has_made_is_named(run_script):
    assert "fn 'train' uses the global 'wandb', a __main__.Wandb, which cannot be sent" in run_script(FROM_SCRIPT).stderr


def test_a_decorator_has_the_state_that_the_script_has_set(run_script):
    assert run_script(DECORATED).stdout == "6\n"
