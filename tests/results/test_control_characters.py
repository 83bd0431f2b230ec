"""What mpwatch prints of ranks has no control character, whatever the ranks contain. The data that a program gets stay true."""

import multiprocessing
import os
import re
import threading

import pytest

import mpwatch

NASTY = "bad\x1b]0;title\x07\r\x1b[2J\x85\udcff\u202e\n\tend"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
CLEAN = r"bad\x1b]0;title\x07\r\x1b[2J\x85\udcff\u202e"


def test_an_exception(caplog, capsys):
    def fails():
        def step_of_rank():
            raise ValueError(NASTY)

        mpwatch.report(step=1, **{"lo\x1bss\n\udcff": 1.0})
        step_of_rank.__code__ = step_of_rank.__code__.replace(co_name="st\x1bep\n", co_filename="/tr\x1bain\n.py")
        step_of_rank()

    caplog.set_level("DEBUG", "mpwatch")
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(fails, 1, progress=True)
    error, result = caught.value, caught.value.result
    assert error.__cause__.args == (NASTY,)
    assert result.progress[0].metrics == {"lo\x1bss\n\udcff": 1.0}
    with pytest.raises(SystemExit):
        mpwatch.main(fails, 1)
    printed = capsys.readouterr().err
    texts = [str(error), repr(error), error._repr_html_(), error.root_cause.summary, error.root_cause.traceback, str(result)]
    assert not any(map(CONTROL.search, [*texts, caplog.text, printed]))
    verdict = f"rank 0 failed first: ValueError: {CLEAN} … "
    assert str(error).startswith(verdict)
    assert re.search(r" \(tr\\x1bain\\n\.py:\d+ in st\\x1bep\\n\)$", str(error), re.MULTILINE)
    assert f"ValueError: {CLEAN}\n\tend\nRunFailedError: {verdict}" in printed
    assert r"lo\x1bss\n\udcff 1" in printed


def test_the_end_of_stderr():
    def prints_and_exits():
        os.write(2, b"\x1b[31mred\x1b[0m \x1b]0;title\x07\n")
        os._exit(3)

    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(prints_and_exits, 1, logs=mpwatch.LogSpec(show="none"))
    assert str(caught.value).splitlines()[1:3] == ["  the end of its stderr:", r"    red \x1b]0;title\x07"]


def test_names_of_threads_and_processes_that_keep_a_rank(caplog, capfd):
    def blocks():
        threading.Thread(target=threading.Event().wait, name="th\x1b[2J\n\udcff").start()
        multiprocessing.get_context("fork").Process(target=threading.Event().wait, name="pr\x1b[2J\udcff").start()

    mpwatch.run(blocks, 1, grace_period=0.0)
    names = r"(non-daemon threads: th\x1b[2J\n\udcff; non-daemon processes: pr\x1b[2J\udcff)"
    (record,) = caplog.records
    text = f"rank 0 had returned but was still running 1 s later {names}; mpwatch stopped it. Its value is kept"
    assert record.getMessage() == text
    assert "Traceback" not in capfd.readouterr().err
