"""The caller's `__main__` in a rank, for each way to run a program."""

import os
import pty
import subprocess
import sys

import pytest

from support.programs import ENV, python

SCRIPT = """
import multiprocessing, pickle, sys
from dataclasses import dataclass
import mpwatch

print("the top of the script runs", flush=True)

@dataclass(slots=True)
class Cfg:
    lr: float

    class Inner:
        pass

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

counter = 0

def train(cfg):
    global counter
    counter += 1
    main = sys.modules["__main__"]
    assert (main.counter, main.Cfg) == (1, type(cfg)) == (1, Cfg)
    assert all(pickle.loads(pickle.dumps(thing)) is thing for thing in (Cfg.Inner, even)) and even(10)
    Cfg.Inner.changed = "in the rank"
    return cfg, __name__, pickle.dumps(cfg), odd

cfg = Cfg(0.1)
for value, name, pickled, function in mpwatch.run(train, 2, args=(cfg,)):
    assert type(value) is Cfg and value == cfg == pickle.loads(pickled)
    assert name == "__main__" and function is odd
assert counter == 0 and not hasattr(Cfg.Inner, "changed")
assert multiprocessing.get_start_method(allow_none=True) is None

def relative():
    from . import near
    return near.VALUE

if __package__:
    assert mpwatch.run(relative, 1)[0] == 5
print("all is well")
"""


@pytest.mark.parametrize(
    ("args", "stdin"),
    [
        pytest.param(["package/script.py"], None, id="script without a guard"),
        pytest.param(["-c", SCRIPT], None, id="python -c"),
        pytest.param(["-m", "package.script"], None, id="module of a package", marks=pytest.mark.slow),
        pytest.param(["-"], SCRIPT, id="program on stdin", marks=pytest.mark.slow),
    ],
)
def test_ranks_have_the_functions_classes_and_globals_of_the_program(args, stdin, tmp_path):
    (package := tmp_path / "package").mkdir()
    for name, text in {"__init__": "", "near": "VALUE = 5", "script": SCRIPT}.items():
        (package / f"{name}.py").write_text(text)
    assert python(*args, program=stdin, cwd=tmp_path).stdout == "the top of the script runs\nall is well\n"


def test_an_interactive_session():
    lines = ["import mpwatch", "def f():", "    return 41 + one", "", "one = 1", "print('got', list(mpwatch.run(f, 2)))"]
    controller, terminal = pty.openpty()
    try:
        pipes = {"stdin": terminal, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        session = subprocess.Popen([sys.executable, "-q", "-i"], **pipes, env=ENV, text=True)
        os.write(controller, "".join(f"{line}\n" for line in [*lines, "exit()"]).encode())
        out, _ = session.communicate(timeout=60)
    finally:
        os.close(controller)
        os.close(terminal)
    assert "got [42, 42]" in out


WITHOUT_GUARD = """
import multiprocessing, os, mpwatch

mpwatch.run(os.getpid, 1)
child = multiprocessing.get_context("spawn").Process(target=os.getpid)
child.start()
child.join()
"""


def test_a_run_while_main_is_imported_again_is_explained(tmp_path):
    (tmp_path / "script.py").write_text(WITHOUT_GUARD)
    err = python("script.py", cwd=tmp_path).stderr
    assert "RuntimeError: mpwatch was called while __main__ is being imported again" in err
    assert 'if __name__ == "__main__":' in err
