"""Processes in which no rank can be started or watched: a clear error, before anything is started."""

import multiprocessing
import os

import pytest

import mpwatch
from support.process_state import children
from support.programs import in_own_process, python

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


def run_in_pool():
    return list(mpwatch.run(lambda: multiprocessing.current_process().daemon, 2))


@in_own_process
def test_a_process_of_a_pool_may_have_ranks_though_it_is_daemonic():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(run_in_pool) == [False, False]
