"""Processes in which no rank can be started or watched: a clear error, before anything is started."""

import multiprocessing
import os  # noqa: F401  what `eval` calls
import sys

import pytest

import mpwatch
from support.process_state import children
from support.programs import python

CALLS = {
    "run": "mpwatch.run(os.getpid, 1)",
    "submit": "mpwatch.submit(os.getpid, 1)",
    "group": "mpwatch.WorkerGroup(1).__enter__()",
}
REFUSED = """
import mpwatch, os
try:
    {}
except mpwatch.LaunchError as error:
    print(error)
"""


def test_a_patched_standard_library():
    pytest.importorskip("gevent")
    patch = "from gevent import monkey; monkey.patch_all()"
    out = python("-W", "ignore", "-c", patch + REFUSED.format(CALLS["run"])).stdout
    assert out.startswith("gevent has replaced threads, select, os or subprocess here")


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize("path", [None, "/nonexistent/python"])
def test_a_program_without_an_interpreter(monkeypatch, path, way):
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", path)
    before = children()
    with pytest.raises(mpwatch.LaunchError) as caught:
        eval(CALLS[way])
    assert f"{path or ''!r} is no file; name the interpreter by multiprocessing.set_executable(" in str(caught.value)
    assert children() == before


@pytest.mark.parametrize("way", CALLS)
def test_a_daemonic_process(monkeypatch, way):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    before = children()
    remedy = "start the run in a process that is not daemonic: use ProcessPoolExecutor, in Celery --pool=solo"
    with pytest.raises(mpwatch.LaunchError, match=rf"^this process is daemonic.*{remedy}.*daemon = False before the run$"):
        eval(CALLS[way])
    assert children() == before


@pytest.mark.parametrize("way", CALLS)
def test_a_subinterpreter(way):
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    out = python("-c", f"import {name} as i; i.run_string(i.create(), {REFUSED.format(CALLS[way])!r})").stdout
    assert out.startswith(
        "mpwatch was called in the main thread of a subinterpreter, where no signal can be handled; call it"
    )
