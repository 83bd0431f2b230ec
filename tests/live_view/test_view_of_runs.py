"""The live view of runs without a terminal: the line on stderr, and views that cannot be drawn."""

import contextlib
import io
import logging
import math
import re

import pytest

import mpwatch
from live_view import reporting_functions
from support import failing


def read_last_lines(err):
    """Return the last line, if any, without the time of the run."""
    return [re.sub(r" after [\d.]+ s$", "", line) for line in err.splitlines()[-1:]]


@pytest.mark.parametrize("progress", [None, False, True])
def test_lines_in_a_pipe_only_if_requested(progress, capfd):
    mpwatch.main(reporting_functions.report_steps, 2, args=(8,), progress=progress)
    out, err = capfd.readouterr()
    assert (out, read_last_lines(err)) == ("", ["mpwatch: step 8 of 8 (100 %); loss 0.5; 2 ranks returned"] * bool(progress))
    assert all(line.startswith("mpwatch: ") for line in err.splitlines())


def test_the_last_line_of_a_failure(capfd):
    with pytest.raises(mpwatch.RunFailedError):
        mpwatch.run(reporting_functions.report_and_raise, 2, progress=True)
    assert read_last_lines(capfd.readouterr().err) == ["mpwatch: step 1; 2 ranks: 1 stopped, 1 failed"]


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_the_last_line_of_a_restart(scope, capfd):
    policy = mpwatch.RestartPolicy(4, scope=scope, delay=0)
    mpwatch.run(reporting_functions.report_and_die_once, 2, max_restarts=policy, progress=True)
    assert read_last_lines(capfd.readouterr().err) == ["mpwatch: step 6; 2 ranks returned"]


def test_a_group_has_a_view_for_each_call(capfd):
    with mpwatch.WorkerGroup(2, progress=True) as group:
        for total in (20_000, 30_000):  # a call of less than 2 ms has no view
            group.run(reporting_functions.report_steps, (total,))
            expected = f"mpwatch: step {total} of {total} (100 %); loss 0.5; 2 ranks returned"
            assert read_last_lines(capfd.readouterr().err) == [expected]


def test_a_map_shows_how_many_items_are_done(capfd):
    list(mpwatch.map(math.sqrt, range(4), 2, progress=True))
    assert "mpwatch: item 4 of 4 (100 %)" in capfd.readouterr().err.splitlines()[-1]


class RaisingStream(io.StringIO):
    def __init__(self, error):
        super().__init__()
        self._error = error

    def write(self, text):
        raise self._error("in the view")


def test_a_view_that_raises_is_logged_and_dropped(caplog):
    with contextlib.redirect_stderr(RaisingStream(ZeroDivisionError)):
        assert len(mpwatch.run(reporting_functions.report_steps, 2, args=(3,), progress=True)) == 2
    (record,) = caplog.records
    assert (record.levelno, record.exc_info[0]) == (logging.WARNING, ZeroDivisionError)
    assert record.message == "the live view failed; the run goes on without it"


def test_a_keyboard_interrupt_in_a_view_is_raised_by_the_run():
    with contextlib.redirect_stderr(RaisingStream(KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        mpwatch.run(failing.wait_to_be_stopped, 2, grace_period=5, progress=True)


def test_a_program_without_stdout_and_stderr(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr("sys.stdout", None)
    assert len(mpwatch.run(reporting_functions.report_steps, 2, args=(3,))) == 2
