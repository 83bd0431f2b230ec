"""Modules that start ranks at their import, which the ranks would repeat."""

import importlib
import os
import sys

import pytest

import mpwatch
from support import functions
from support.programs import ENV, python

REMEDY = 'put the call into a function, or under `if __name__ == "__main__":`'
IN_RANK = "import os, mpwatch\nfrom support import functions\nif 'RANK' in os.environ:\n    "


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


@pytest.mark.parametrize(
    "statement", ["mpwatch.run(fn, 1)", "mpwatch.main(fn, 1)", "with mpwatch.WorkerGroup(1) as group: group.run(fn)"]
)
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


def list_ranks():
    return list(mpwatch.run(functions.rank, 1))


def test_a_module_of_a_later_call_of_a_group_is_refused(make_module):
    """Also a module that only an argument needs. The rank may start ranks again when it has loaded its call."""
    module = make_module("late", f"class Argument: pass\n{IN_RANK}mpwatch.run(functions.rank, 1)")
    with mpwatch.WorkerGroup(1) as group:
        group.run(functions.rank)
        with pytest.raises(mpwatch.RunFailedError, match="could not load the call") as caught:
            group.run(functions.double, (module.Argument(),))
        assert type(caught.value.__cause__) is RuntimeError
        assert "at the import of module late, line 5 (" in str(caught.value.__cause__)
        assert list(group.run(list_ranks)) == [[0]]
