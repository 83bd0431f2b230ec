"""Modules that start ranks at their import, which the ranks would repeat."""

import importlib
import os
import sys
import threading
from pathlib import Path

import pytest

import mpwatch
from support import functions
from support.programs import ENV, python
from watcher.launching_modules import threaded

LAUNCHES = Path(__file__).parent / "launching_modules" / "launches.py"
REMEDY = 'put the call into a function, or under `if __name__ == "__main__":`'


@pytest.fixture
def make_module(tmp_path, monkeypatch):
    """Return a function that writes a module, and imports it in this process."""

    def make(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    monkeypatch.syspath_prepend(tmp_path)
    return make


def in_rank_only(statement):
    return f"import os, mpwatch\nfrom support import functions\nif 'RANK' in os.environ:\n    {statement}\n"


@pytest.mark.parametrize(
    ("way", "statement"),
    [
        ("run", "    mpwatch.run(fn, 1)"),
        ("main", "    mpwatch.main(fn, 1)"),
        ("group", "    with mpwatch.WorkerGroup(1) as group:"),
    ],
)
def test_a_module_that_starts_ranks_at_its_import_is_refused_in_the_rank(tmp_path, way, statement):
    program = "from watcher.launching_modules import launches"
    done = python("-c", program, cwd=tmp_path, env={**ENV, "LAUNCH": way}, check=False)
    assert done.returncode == 1
    pids = (tmp_path / "imports").read_text().split()
    assert len(pids) == 2, "the caller and its rank"
    line = LAUNCHES.read_text().splitlines().index(statement) + 1
    where = (
        f"mpwatch was called at the import of module watcher.launching_modules.launches, line {line} ({LAUNCHES}), in a rank"
    )
    text = f"RuntimeError: {where}; the new ranks would do the same, without end; {REMEDY}"
    assert f"RunFailedError: rank 0 could not load the call: {text}" in done.stderr
    assert f'  File "{LAUNCHES}", line {line}, in <module>\n{statement}\n' in done.stderr
    assert "importlib" not in done.stderr


def test_a_module_of_a_later_call_of_a_group_is_refused(make_module):
    """Also a module that only an argument needs. The rank may start ranks again when it has loaded its call."""
    module = make_module("late", "class Argument: pass\n" + in_rank_only("mpwatch.run(functions.rank, 1)"))
    with mpwatch.WorkerGroup(1) as group:
        group.run(functions.rank)
        with pytest.raises(mpwatch.RunFailedError, match="could not load the call") as caught:
            group.run(functions.double, (module.Argument(),))
        assert type(caught.value.__cause__) is RuntimeError
        assert "at the import of module late, line 5 (" in str(caught.value.__cause__)
        assert list(group.run(list_ranks)) == [[0]]


class SetsInRank:
    """An argument that calls `meet` in the rank while it is unpickled."""

    def __getstate__(self):
        return os.getpid()

    def __setstate__(self, pid):
        if os.getpid() != pid:
            meet()


def meet():
    """Have the thread that `start_thread` has started start ranks, and wait until it has."""
    may_start.set()
    thread.join()


def start_thread():
    global may_start, thread, results
    may_start, results = threading.Event(), []
    thread = threading.Thread(target=lambda: may_start.wait() and results.append(list_ranks()), daemon=True)
    thread.start()


def return_results(_):
    return results


def test_a_thread_of_an_earlier_call_may_start_ranks_while_the_next_call_is_loaded():
    with mpwatch.WorkerGroup(1) as group:
        group.run(start_thread)
        assert list(group.run(return_results, (SetsInRank(),))) == [[[0]]]


def list_ranks():
    return list(mpwatch.run(functions.rank, 1))


def test_a_thread_that_a_module_starts_at_its_import_is_refused_at_any_time():
    ((error,),) = mpwatch.run(threaded.fn, 1)
    assert error == (
        "mpwatch was called while a rank was loading its own call, or in a thread that was started then; the new ranks would do "
        "the same, without end; make the call, and start its thread, in the function that the rank runs"
    )


def test_a_module_that_the_function_imports_starts_ranks_once(tmp_path, make_module):
    """The rank has loaded its call, so it may start ranks. These ranks are refused, since they load the module."""
    make_module("lazy", "import os, mpwatch\ndef fn(): pass\n" + in_rank_only("mpwatch.run(fn, 1)"))
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(importlib.import_module, 1, args=("lazy",))
    error = caught.value.__cause__
    assert type(error) is mpwatch.RunFailedError
    assert "at the import of module lazy, line 6 (" in str(error.__cause__)
