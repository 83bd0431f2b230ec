"""The caller's `__main__` in a rank, for each way to run a program."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import ENV, python

PROGRAMS = Path(__file__).parent / "main_programs"
SCRIPT = (PROGRAMS / "script.py").read_text()


@pytest.mark.parametrize(
    ("args", "stdin"),
    [
        pytest.param(["main_programs/script.py"], None, id="script without a guard"),
        pytest.param(["-c", SCRIPT], None, id="python -c"),
        pytest.param(["-m", "main_programs.script"], None, id="module of a package", marks=pytest.mark.slow),
        pytest.param(["-"], SCRIPT, id="program on stdin", marks=pytest.mark.slow),
    ],
)
def test_ranks_have_the_functions_classes_and_globals_of_the_program(args, stdin):
    output = python(*args, program=stdin, cwd=PROGRAMS.parent).stdout
    assert output == "the top of the script runs\nall is well\n"


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


@pytest.mark.parametrize(
    "args", [["pools.py"], pytest.param(["-m", "pools"], marks=pytest.mark.slow)], ids=["script", "module"]
)
def test_processes_of_a_rank_find_the_classes_of_the_script(args):
    python(*args, cwd=PROGRAMS)


def test_a_run_while_main_is_imported_again_is_explained():
    err = python("without_guard.py", cwd=PROGRAMS).stderr
    assert "RuntimeError: mpwatch was called while __main__ is being imported again" in err
    assert 'if __name__ == "__main__":' in err
