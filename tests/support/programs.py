"""`python()` runs a program in a Python process of its own, as users do. `call()` runs a function there."""

import functools
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "PYTHONWARNINGS": "error"}


def python(*args, program=None, stdin=None, cwd=None, check=True, env=ENV, within=(), timeout=100):
    """Run `python ARGS` and return the finished process.

    `program` is text for its stdin, `stdin` a file for it. `within` is a command that starts Python, such as `unshare`.
    `timeout` is in seconds.
    """
    done = subprocess.run(
        [*within, sys.executable, *args],
        **({"input": program} if stdin is None else {"stdin": stdin}),
        text=True,
        capture_output=True,
        cwd=cwd,
        env=env,
        timeout=timeout,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def call(function, *args, **options):
    """Call a function of a test module in a Python process of its own. The options are those of `python()`.

    The process gets the arguments as `repr()` writes them. A rank imports the module if a function of the module reaches it by
    reference. Ranks get nested functions by value.
    """
    return python(*command(function, *args), **options)


def command(function, *args):
    name = function.__name__
    return "-c", f"from {function.__module__} import {name} as fn; getattr(fn, '__wrapped__', fn)(*{args!r})"


def in_own_process(test):
    """Decorate a test that changes its process: run it in a Python process of its own, as `call()` does."""

    @functools.wraps(test)
    def run(**kwargs):
        call(test, *kwargs.values())

    return run
