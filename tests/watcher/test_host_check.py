"""Unusual processes: where no rank can be started or watched, there is a clear error before anything is started."""

import multiprocessing
import os
import sys

import pytest

import mpwatch
from support.process_state import children
from support.programs import python

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


def test_a_daemonic_process_can_start_ranks_that_are_not(monkeypatch):
    """As in `multiprocessing.Pool` and in Celery's prefork pool."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert list(mpwatch.run(lambda: multiprocessing.current_process().daemon, 2)) == [False, False]


def test_a_subinterpreter():
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    out = python("-c", f"import {name} as i; i.run_string(i.create(), {REFUSED!r})").stdout
    assert out.startswith(
        "mpwatch was called in the main thread of a subinterpreter, where no signal can be handled; call it"
    )
