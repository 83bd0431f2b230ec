"""If a rank can import nothing more when its function ends, its answer still arrives, and it prints nothing of its own."""

import os
import sys

import pytest

import mpwatch
from support.runs import failed


def forget_all_modules(_):
    sys.path.clear()
    sys.meta_path.clear()


def leave_the_root_folder(folder):
    os.chroot(folder)
    os.chdir("/")
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="that takes root")


@pytest.mark.parametrize("sabotage", [forget_all_modules, pytest.param(leave_the_root_folder, marks=NEEDS_ROOT)])
def test_a_value_and_an_exception_arrive(sabotage, tmp_path, capfd):
    def return_value(value):
        sabotage(tmp_path)
        return value

    def raise_with_cause():
        sabotage(tmp_path)
        try:
            raise OSError(7, "the cause")
        except OSError as error:
            raise ValueError("step", 7) from error

    assert list(mpwatch.run(return_value, 1, args=({"loss": 0.5},))) == [{"loss": 0.5}]
    error = failed(raise_with_cause, 1)
    assert str(error).startswith("rank 0 failed first: ValueError: ('step', 7) (test_last_imports.py:")
    cause, traceback = error.__cause__, error.root_cause.traceback
    assert (type(cause), cause.args, cause.__cause__.errno) == (ValueError, ("step", 7), 7)
    assert "OSError: [Errno 7] the cause" in traceback
    assert "raise_with_cause" in traceback
    assert capfd.readouterr() == ("", "")
