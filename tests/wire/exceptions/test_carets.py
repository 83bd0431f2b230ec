"""The caller prints the traceback of a rank as the rank itself would: the same lines, and the same carets below them."""

import multiprocessing
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor

import pytest

import mpwatch
from support.programs import in_own_process, python
from wire.exceptions.raising_expressions import EXAMPLES, division_after_wide_characters, raise_all


def test_tracebacks_are_printed_as_in_the_rank():
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(raise_all, 1)
    errors = caught.value.__cause__.exceptions
    assert len(errors) == len(EXAMPLES) > 30
    for example, error in zip(EXAMPLES, errors, strict=True):
        assert "".join(traceback.format_exception(error)) == error.text, example.__name__


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 13), reason="Python 3.13 shows lines of `python -c` for all code from strings"
)
def test_code_from_a_string_has_no_lines_of_the_callers_own_program():
    program = "import mpwatch, wire.exceptions.raising_expressions as e; mpwatch.run(e.code_without_source, 1)"
    text = python("-c", program, check=False).stderr
    assert '\n  File "<string>", line 1, in <module>\nZeroDivisionError: division by zero\n' in text


def run_one_rank():
    mpwatch.run(division_after_wide_characters, 1)


@in_own_process
def test_an_error_from_an_executor_keeps_the_exception_of_the_rank():
    """It is pickled once more. The executor replaces `__cause__` by its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        error = pool.submit(run_one_rank).exception()
    with pytest.raises(ZeroDivisionError) as caught:
        division_after_wide_characters()
    expected = traceback.format_exception(caught.type, caught.value, caught.tb.tb_next)
    assert traceback.format_exception(error.root_cause.exception) == expected
    assert error.result.verdict.startswith(
        "rank 0 failed first: ZeroDivisionError: division by zero (raising_expressions.py:"
    )
