"""If a rank can import nothing more when its function ends, its answer still arrives, and it prints nothing of its own."""

import os
from functools import partial

import pytest

import mpwatch
from worker import last_imports

NEED_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="that takes root")


@pytest.mark.parametrize(
    "sabotage", [last_imports.forget_all_modules, pytest.param(last_imports.leave_the_root_folder, marks=NEED_ROOT)]
)
def test_a_value_and_an_exception_arrive(sabotage, tmp_path, capfd):
    sabotage = partial(sabotage, tmp_path)
    assert list(mpwatch.run(last_imports.return_value, 1, args=(sabotage, {"loss": 0.5}))) == [{"loss": 0.5}]
    with pytest.raises(mpwatch.RunFailedError, match=r"ValueError: \('step', 7\) \(last_imports.py:") as caught:
        mpwatch.run(last_imports.raise_with_cause, 1, args=(sabotage,))
    error, traceback = caught.value.__cause__, caught.value.root_cause.traceback
    assert (type(error), error.args, error.__cause__.errno) == (ValueError, ("step", 7), 7)
    assert "OSError: [Errno 7] the cause" in traceback
    assert "in raise_with_cause" in traceback
    assert capfd.readouterr() == ("", "")
