"""If a rank can import nothing more when its function ends, its answer still arrives, and it prints nothing of its own."""

import os
from functools import partial

import pytest

import mpwatch
from worker import last_imports

need_root = pytest.mark.skipif(os.geteuid() != 0, reason="that takes root")


@pytest.fixture(
    params=[
        last_imports.forget_all_modules,
        pytest.param(last_imports.leave_the_root_folder, marks=need_root),
    ]
)
def sabotage(request, tmp_path, capfd):
    yield partial(request.param, tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_value_arrives(sabotage):
    assert list(mpwatch.run(last_imports.return_value, 1, args=(sabotage, {"loss": 0.5}))) == [{"loss": 0.5}]


def test_an_exception_arrives(sabotage):
    with pytest.raises(mpwatch.RunFailedError, match=r"ValueError: \('step', 7\) \(last_imports.py:") as caught:
        mpwatch.run(last_imports.raise_with_cause, 1, args=(sabotage,))
    error, traceback = caught.value.__cause__, caught.value.root_cause.traceback
    assert (type(error), error.args, error.__cause__.errno) == (ValueError, ("step", 7), 7)
    assert "OSError: [Errno 7] the cause" in traceback
    assert "in raise_with_cause" in traceback
