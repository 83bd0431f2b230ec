"""Runs programs the way users do, in a Python of their own."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "PYTHONWARNINGS": "error"}


def python(*args, program=None, stdin=None, cwd=None, check=True, env=ENV, within=()):
    """The finished process of `python ARGS`, program on its stdin, or that file; started by a command that prepares for it."""
    done = subprocess.run(
        [*within, sys.executable, *args],
        **({"input": program} if stdin is None else {"stdin": stdin}),
        text=True,
        capture_output=True,
        cwd=cwd,
        env=env,
        timeout=100,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done
