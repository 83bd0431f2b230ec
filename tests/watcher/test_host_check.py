"""Processes in which no rank can be started or watched, and modules that start ranks at their import: a clear error."""

import multiprocessing
import os

import pytest

import mpwatch
from support.process_state import children
from support.programs import ENV, python

CALLS = [lambda: mpwatch.run(os.getpid, 1), lambda: mpwatch.submit(os.getpid, 1), lambda: mpwatch.WorkerGroup(1).__enter__()]
REFUSED = """
import mpwatch, os
try:
    mpwatch.run(os.getpid, 1)
except mpwatch.LaunchError as error:
    print(error)
"""


def refuse_all(text):
    before = children()
    for call in CALLS:
        with pytest.raises(mpwatch.LaunchError, match=text):
            call()
    assert children() == before


def test_a_patched_standard_library():
    pytest.importorskip("gevent")
    out = python("-W", "ignore", "-c", "from gevent import monkey; monkey.patch_all()" + REFUSED).stdout
    assert out.startswith("gevent has replaced threads, select, os or subprocess here")


@pytest.mark.parametrize("path", [None, "/nonexistent/python"])
def test_a_program_without_an_interpreter(monkeypatch, path):
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", path)
    refuse_all(rf"{path or ''!r} is no file; name the interpreter by multiprocessing.set_executable\(")


IN_POOL = """
import mpwatch, multiprocessing

def is_daemonic():
    return multiprocessing.current_process().daemon

def run():
    return is_daemonic(), list(mpwatch.run(is_daemonic, 2))

with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.apply(run))
"""


def test_a_daemonic_process_can_start_ranks_which_are_not_daemonic():
    assert python("-c", IN_POOL).stdout == "(True, [False, False])\n"


REMEDY = 'put the call into a function, or under `if __name__ == "__main__":`'


@pytest.mark.parametrize("statement", ["mpwatch.run(fn, 1)", "with mpwatch.WorkerGroup(1) as group: group.run(fn)"])
def test_a_module_that_starts_ranks_at_its_import_is_refused_in_the_rank(tmp_path, statement):
    module = tmp_path / "launches.py"
    module.write_text(
        "import os, mpwatch\n"
        "def fn(): pass\n"
        "with open('imports', 'a') as imports: print(os.getpid(), file=imports)\n"
        "if len(open('imports').readlines()) < 4:  # in case nothing else stops it\n"
        f"    {statement}\n"
    )
    path = os.pathsep.join([str(tmp_path), ENV["PYTHONPATH"]])
    done = python("-c", "import launches", cwd=tmp_path, env={**ENV, "PYTHONPATH": path}, check=False)
    assert done.returncode == 1
    assert len((tmp_path / "imports").read_text().split()) == 2, "the caller and its rank"
    where = f"mpwatch was called at the import of module launches, line 5 ({module}), in a rank"
    text = f"RuntimeError: {where}; the new ranks would do the same, without end; {REMEDY}"
    assert f"RunFailedError: rank 0 could not load the call: {text}" in done.stderr
    assert f'  File "{module}", line 5, in <module>\n    {statement}\n' in done.stderr
    assert "importlib" not in done.stderr
