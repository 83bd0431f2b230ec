"""`python()` runs a program in a Python process of its own, as users do."""

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
