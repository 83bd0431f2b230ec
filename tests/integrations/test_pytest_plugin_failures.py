"""Tests of the pytest plugin: failures in ranks are reported, even if something else fails or is skipped."""

from support.pytest_runs import match_output

pytest_plugins = "pytester"


def test_errors_in_fixtures_and_teardown(run_pytest):
    result = run_pytest(
        """
import logging
pytestmark = pytest.mark.mpwatch(nprocs=2)

@pytest.fixture
def broken():
    logging.getLogger("of.a.test").warning("about to break")
    raise ValueError("in set-up")

@pytest.fixture
def breaks_later():
    yield
    raise ValueError("in teardown")

@pytest.fixture(scope="module")
def breaks_last():
    yield
    raise ValueError("at the end")

def test_set_up(broken): ...
def test_teardown(breaks_later): ...
def test_last(breaks_last): ...
"""
    )
    result.assert_outcomes(passed=1, failed=2, errors=1)
    match_output(
        result,
        "*ERROR at teardown of test_last*",
        "E       ValueError: at the end",
        "*FAILURES*",
        "E       ValueError: in set-up",
        "Captured log setup:",
        "*about to break*",
        "E       ValueError: in teardown",
    )


def test_no_failure_is_hidden_by_a_skip_or_another_failure(run_pytest):
    result = run_pytest(
        """
import warnings
pytestmark = pytest.mark.mpwatch(nprocs=2)

def rank():
    return mpwatch.current_worker().rank

@pytest.fixture
def breaks_later():
    yield
    raise ValueError("in teardown")

def test_skip_and_teardown(breaks_later):
    pytest.skip("of no use")

def test_failure_and_teardown(breaks_later):
    warnings.warn("not lost", stacklevel=1)
    assert 0, "in the test"

@pytest.mark.parametrize("n", range(10))  # the order in which the ranks end varies
def test_one_skips_and_one_fails(n):
    if rank() == n % 2:
        pytest.skip("of no use")
    assert 0, "in the other rank"

def run_subtest(request, error):
    def run():
        if error:
            raise error
    call = pytest.CallInfo.from_call(run, when="call")
    request.node.ihook.pytest_runtest_makereport(item=request.node, call=call)

def test_a_subtest_fails_after_one_is_skipped(request):
    run_subtest(request, pytest.skip.Exception("of no use"))
    run_subtest(request, rank() and ValueError("in a subtest"))

def test_a_subtest_is_skipped(request):
    run_subtest(request, pytest.skip.Exception("of no use"))

@pytest.fixture(scope="module")
def breaks_early():
    yield
    raise ValueError("in teardown of the module")

def test_early_teardown(breaks_early):
    pytest.skip("after a skip fixtures are torn down")

class TestClass:
    @classmethod
    def teardown_class(cls):
        raise ValueError("in teardown of the class")

    def test_method(self): ...

def test_after_the_class(): ...
""",
    )
    result.assert_outcomes(passed=2, failed=15)
    match_output(
        result,
        "E       ValueError: in teardown",
        "E       AssertionError: in the test",
        "*Captured stderr of rank 0 call*",
        "E       ValueError: in teardown",
        "*test_it.py:*: UserWarning: not lost",
        "E       AssertionError: in the other rank",
        "E       in rank 1 of 2",
        "E         rank 0*Skipped: of no use (test_it.py:*)",
        "E * ValueError: in a subtest",
        "*_ test_early_teardown _*",
        "E       ValueError: in teardown of the module",
        "*_ TestClass.test_method _*",
        "E       ValueError: in teardown of the class",
    )


def test_errors_for_which_pytest_has_its_own_text(run_pytest, pytester):
    result = run_pytest(
        '''
import warnings
pytestmark = pytest.mark.mpwatch(2)

def test_no_such_fixture(nothing): ...

@pytest.mark.xfail(reason="there is none")
def test_no_such_fixture_is_expected(nothing): ...

def test_without_traceback():
    if mpwatch.current_worker().rank == 1:
        pytest.fail("a message", pytrace=False)

def function():
    """
    >>> mpwatch.current_worker().rank
    0
    """

def test_warning():
    warnings.warn("only reported", stacklevel=1)

@pytest.mark.filterwarnings("ignore")
def test_no_warning():
    warnings.warn("filtered")

def test_property(record_property):
    record_property("ranks", mpwatch.current_worker().world_size)

@pytest.mark.mark_of_reruns
def test_it_comes_with_another_name(): ...

@pytest.fixture(scope="module")
def last():
    yield
    print("printed at the end")
    raise ValueError("at the end")

def test_last(last): ...
''',
        "--doctest-modules",
        "--junitxml=report.xml",
        "--setup-show",
        "-p",
        "rerunfailures",
        conftest="""
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.mpwatch(2))
        item.name = item.name.replace("it_comes", "renamed")
""",
        # has the name of a plugin that ranks unregister
        rerunfailures="""
def pytest_configure(config):
    config.addinivalue_line("markers", "mark_of_reruns: it is known")
""",
    )
    result.assert_outcomes(passed=5, failed=3, xfailed=1, errors=1)
    shown = match_output(
        result,
        "E       ValueError: at the end",
        "*Captured stdout teardown*",
        "stdout of rank 0:",
        "printed at the end",
        "*doctest*function*",
        "Expected:",
        "Got:",
        "    1",
        "in rank 1 of 2",
        "*_ test_no_such_fixture _*",
        "E       fixture 'nothing' not found",
        "in rank ? of 2",
        "a message",
        "in rank 1 of 2",
        "  rank 0: had returned",
        "*test_it.py:*: UserWarning: only reported",
        "*= 3 failed, 5 passed, 1 xfailed, 1 warning, 1 error in *",
    )
    assert "hidden" not in shown
    assert shown.count("only reported") == 2  # the warning and its source line
    assert (pytester.path / "report.xml").read_text().count('<property name="ranks" value="2"') == 1


def test_an_error_in_ranks_only_is_reported_by_each_test(run_pytest):
    result = run_pytest(
        "pytestmark = pytest.mark.mpwatch(1)\ndef test_one(): ...\ndef test_two(): ...\n",
        "-p",
        "no:capture",
        conftest="""
import os
if "RANK" in os.environ:
    raise ValueError("it breaks here")
""",
    )
    result.assert_outcomes(failed=2)
    match_output(
        result,
        "*_ test_one _*",
        "E*ValueError: it breaks here",
        "E*in rank 0 of 1",
        "conftest.py:3: ValueError",
        "*_ test_two _*",
    )


def test_bad_marks_are_reported(run_pytest):
    result = run_pytest(
        """
@pytest.mark.mpwatch(nprocs=0)
def test_number(): ...
@pytest.mark.mpwatch(nproc=2)
def test_name(): ...
@pytest.mark.mpwatch(2, 3)
def test_two(): ...
@pytest.mark.mpwatch(2, nprocs=3)
def test_twice(): ...
@pytest.mark.mpwatch(2, logs=None)
def test_logs(): ...
@pytest.mark.mpwatch(1, timeout=-1)
def test_timeout(): ...
@pytest.mark.mpwatch(8)
def test_launch(): ...
""",
        conftest="""
import os, resource
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if item.name == "test_launch":
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, limits[1]))
    try:
        return (yield)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
""",
    )
    result.assert_outcomes(failed=7)
    shown = match_output(
        result,
        "mark mpwatch: nprocs must be at least 1, *not 0",
        "mark mpwatch: *missing 1 required positional argument: 'nprocs'*",
        "mark mpwatch: it takes one positional argument, nprocs, but has 2: (2, 3)",
        "mark mpwatch: it has nprocs twice: 2 and 3",
        "mark mpwatch: the plugin sets the option 'logs' itself; omit it",
        "mark mpwatch: timeout must be a number of seconds, more than 0, not -1",
        "*_ test_launch _*",
        "*Too many open files*",
    )
    assert "mpwatch/" not in shown
