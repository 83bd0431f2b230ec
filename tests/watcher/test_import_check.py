"""Modules that start ranks at their import, which the ranks would repeat."""

import os

import pytest

from support.programs import ENV, python

REMEDY = 'put the call into a function, or under `if __name__ == "__main__":`'


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
