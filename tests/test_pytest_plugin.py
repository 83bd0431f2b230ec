"""The pytest plugin, run as its users run it: pytest in a process of its own, over files of tests."""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import is_alive

pytest_plugins = "pytester"

PLUGIN = ("-p", "mpwatch.integrations.pytest_plugin", "-p", "no:cacheprovider")


@pytest.fixture
def run(pytester, monkeypatch):
    """Run that file of tests; where mpwatch is installed, its entry point would bring the plugin a second time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source, *args, **files):
        pytester.makepyfile(test_it=f"import os, sys\nimport pytest\nimport mpwatch\n\n{source}", **files)
        return pytester.runpytest_subprocess(*PLUGIN, "--strict-markers", *args)

    return run


def fails(result, *lines):
    result.stdout.fnmatch_lines(lines)
    return result.stdout.str()


def test_a_failing_assertion_is_shown_as_any_other(run):
    result = run(
        """
@pytest.mark.mpwatch(nprocs=4)
@pytest.mark.parametrize("shard", ["a", "b"])
def test_shards(shard):
    rank = mpwatch.current_worker().rank
    print("reading", shard, "in", rank)
    os.write(2, b"compiled code speaks, too\\n")
    found = {"rows": 10, "columns": [16, 17 if rank == 2 and shard == "b" else 16]}
    assert found == {"rows": 10, "columns": [16, 16]}
""",
        "-rP",
    )
    result.assert_outcomes(passed=1, failed=1)
    shown = fails(
        result,
        "*FAILURES*",
        "*test_shards?b?*",
        ">       assert found == {*",
        "E       AssertionError: assert {*",
        "E         Differing items:",
        "E         {'columns': [[]16, 17[]]} != {'columns': [[]16, 16[]]}",
        "E * in rank 2 of 4",
        "E * ranks 0-1, 3: had returned",
        "test_it.py:*: AssertionError",
        "*Captured stdout of rank 2 call*",
        "reading b in 2",
        "*Captured stderr of rank 2 call*",
        "compiled code speaks, too",
    )
    assert shown.count("reading b in") == 4
    assert "mpwatch/integrations" not in shown
    assert "pluggy" not in shown.partition("FAILURES")[2]


def test_fixtures_are_those_of_the_rank_and_are_torn_down_there(run, pytester):
    result = run(
        """
pytestmark = pytest.mark.mpwatch(2)

def note(text):
    with open(f"notes{mpwatch.current_worker().rank}", "a") as file:
        file.write(text + "\\n")

@pytest.fixture(scope="session", autouse=True)
def session():
    note("session")
    yield
    note("session ends")

@pytest.fixture(scope="module")
def pid():
    note("module")
    yield os.getpid()
    note("module ends")

@pytest.fixture(params=["x", "y"])
def letter(request, of_conftest):
    note(f"set up {request.param}{of_conftest}")
    yield request.param
    note(f"tear down {request.param}")

def test_letters(letter, pid, monkeypatch, capsys):
    assert pid == os.getpid()
    monkeypatch.setenv("LETTER", letter)
    print("captured")
    assert capsys.readouterr().out == "captured\\n"

class TestClass:
    @classmethod
    def setup_class(cls):
        note("class")

    def setup_method(self):
        self.world_size = mpwatch.current_worker().world_size

    @pytest.mark.parametrize("n", [2])
    def test_method(self, n, tmp_path, tmp_path_factory):
        assert self.world_size == n
        assert "LETTER" not in os.environ
        assert not list(tmp_path.glob("own*"))
        own = tmp_path_factory.mktemp("own")
        assert own.parent.name == f"rank{mpwatch.current_worker().rank}"
        (tmp_path / own.parent.name).touch()

def test_one_folder_for_all(tmp_path):
    (tmp_path / str(mpwatch.current_worker().rank)).touch()

@pytest.mark.filterwarnings("error:my own")
def test_filters_hold():
    import warnings
    with pytest.raises(UserWarning):
        warnings.warn("my own")
""",
        conftest="""
import pytest

@pytest.fixture
def of_conftest():
    return "!"
""",
    )
    result.assert_outcomes(passed=5)
    notes = "session module set-up-x! tear-down-x set-up-y! tear-down-y class module-ends session-ends".replace("-", " ")
    for rank in range(2):
        told = (pytester.path / f"notes{rank}").read_text()
        assert " ".join(told.split()) == notes, told


def test_skips_and_expected_failures(run):
    result = run(
        """
pytestmark = pytest.mark.mpwatch(nprocs=2)

def rank():
    return mpwatch.current_worker().rank

@pytest.mark.skipif(True, reason="by a mark")
def test_mark(): ...

def test_imperative():
    pytest.skip("in all")

def test_one_skips():
    if rank() == 1:
        pytest.skip("in one")

@pytest.mark.xfail(reason="one of them")
def test_xfail():
    assert rank() == 0

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True, reason="of a type")
def test_xfail_raises():
    1 / rank()

@pytest.mark.xfail(raises=KeyError, reason="of another type")
def test_xfail_of_another_type():
    1 / rank()

def test_imperative_xfail():
    pytest.xfail("known")

@pytest.fixture
def known(request):
    request.node.add_marker(pytest.mark.xfail(reason="marked by a fixture"))

def test_marked_by_a_fixture(known):
    assert rank() == 0

@pytest.mark.xfail(strict=True, reason="it passes")
def test_strict():
    pass

@pytest.mark.xfail(reason="it passes")
def test_not_strict():
    pass

def test_pytest_fail():
    if rank() == 1:
        pytest.fail("as told")
""",
        "-rsxXf",
    )
    result.assert_outcomes(skipped=3, xfailed=4, failed=3, xpassed=1)
    fails(
        result,
        "E*ZeroDivisionError: division by zero",
        "[[]XPASS(strict)] it passes",
        "E * Failed: as told",
        "E * in rank 1 of 2",
        "SKIPPED [[]1] test_it.py:11: by a mark",
        "SKIPPED [[]1] test_it.py:15: in all",
        "SKIPPED [[]1] test_it.py:19: in one",
        "XFAIL test_it.py::test_xfail - *one of them",
        "XFAIL test_it.py::test_xfail_raises - *of a type",
        "XFAIL test_it.py::test_imperative_xfail - *known",
        "XFAIL test_it.py::test_marked_by_a_fixture - *marked by a fixture",
        "XPASS test_it.py::test_not_strict - *it passes",
    )


def test_one_warm_group_for_a_module(run):
    result = run(
        """
import itertools

counter = itertools.count()
pids = set()

@pytest.mark.mpwatch(nprocs=2)
@pytest.mark.parametrize("n", range(20))
def test_same(n):
    pids.add(os.getpid())
    assert (next(counter), len(pids)) == (n, 1)

@pytest.mark.mpwatch(nprocs=2, timeout=30)
def test_another_limit_needs_no_other_ranks():
    assert next(counter) == 20

@pytest.mark.mpwatch(nprocs=3)
def test_others():
    assert next(counter) == 0

def test_here():
    assert next(counter) == 0

@pytest.mark.mpwatch(nprocs=2)
def test_first_ones_again():
    assert next(counter) == 21
""",
        "--durations=0",
        "--durations-min=0",
    )
    result.assert_outcomes(passed=24)
    calls = re.findall(r"([\d.]+)s call +test_it.py::test_same", result.stdout.str())
    assert len(calls) == 20
    assert sorted(map(float, calls))[10] < 0.2  # a start takes longer


def test_a_rank_that_dies_or_hangs(run):
    result = run(
        """
import time
pytestmark = pytest.mark.mpwatch(nprocs=2, grace_period=1)

@pytest.fixture(scope="module")
def pid():
    return os.getpid()

def test_dies(pid):
    print("last words")
    if mpwatch.current_worker().rank == 1:
        os.kill(os.getpid(), 9)

def test_new_ranks(pid):
    assert pid == os.getpid()

@pytest.mark.mpwatch(timeout=0.5)
def test_hangs():
    if mpwatch.current_worker().rank == 0:
        time.sleep(60)

@pytest.fixture(scope="module")
def never_ends():
    yield
    time.sleep(60)

@pytest.mark.mpwatch(timeout=0.5)
def test_after_that(never_ends):
    pass
"""
    )
    result.assert_outcomes(passed=2, failed=2, errors=1)
    shown = fails(
        result,
        "*ERROR at teardown of test_after_that*",
        "*did not end within timeout=0.5 s: *",
        "*test_it.py:29 in never_ends*",
        "rank 1 was killed by SIGKILL (*",
        "  its logs: *",
        "  rank 0: *",
        "*Captured stdout of rank 1 call*",
        "last words",
        "*did not end within timeout=0.5 s: rank 0 had not returned*",
        "*test_it.py:24 in test_hangs*",
    )
    assert "hidden" not in shown


def test_errors_in_fixtures_and_teardown(run):
    result = run(
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
    fails(
        result,
        "*ERROR at teardown of test_last*",
        "E       ValueError: at the end",
        "*FAILURES*",
        "E       ValueError: in set-up",
        "Captured log setup:",
        "*about to break*",
        "E       ValueError: in teardown",
    )


def test_no_failure_hides_behind_a_skip_or_another_failure(run):
    result = run(
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

@pytest.mark.parametrize("n", range(10))  # one of them is first
def test_one_skips_and_one_fails(n):
    if rank() == n % 2:
        pytest.skip("of no use")
    assert 0, "in the other rank"

def part(request, error):
    def run():
        if error:
            raise error
    call = pytest.CallInfo.from_call(run, when="call")
    request.node.ihook.pytest_runtest_makereport(item=request.node, call=call)

def test_a_part_fails_after_one_is_skipped(request):
    part(request, pytest.skip.Exception("of no use"))
    part(request, rank() and ValueError("in a part"))

def test_a_part_is_skipped(request):
    part(request, pytest.skip.Exception("of no use"))

@pytest.fixture(scope="module")
def breaks_early():
    yield
    raise ValueError("in teardown of the module")

def test_early_teardown(breaks_early):
    pytest.skip("for which fixtures are torn down")

class TestClass:
    @classmethod
    def teardown_class(cls):
        raise ValueError("in teardown of the class")

    def test_method(self): ...

def test_after_the_class(): ...
""",
    )
    result.assert_outcomes(passed=2, failed=15)
    fails(
        result,
        "E       ValueError: in teardown",
        "E       AssertionError: in the test",
        "*Captured stderr of rank 0 call*",
        "E       ValueError: in teardown",
        "*test_it.py:*: UserWarning: not lost",
        "E       AssertionError: in the other rank",
        "E       in rank 1 of 2",
        "E         rank 0*Skipped: of no use (test_it.py:*)",
        "E * ValueError: in a part",
        "*_ test_early_teardown _*",
        "E       ValueError: in teardown of the module",
        "*_ TestClass.test_method _*",
        "E       ValueError: in teardown of the class",
    )


def test_what_pytest_tells_in_words_of_its_own(run, pytester):
    result = run(
        '''
import warnings
pytestmark = pytest.mark.mpwatch(2)

def test_no_such_fixture(nothing): ...

@pytest.mark.xfail(reason="there is none")
def test_no_such_fixture_is_expected(nothing): ...

def test_without_traceback():
    if mpwatch.current_worker().rank == 1:
        pytest.fail("as told", pytrace=False)

def function():
    """
    >>> mpwatch.current_worker().rank
    0
    """

def test_warning():
    warnings.warn("only told", stacklevel=1)

@pytest.mark.filterwarnings("ignore")
def test_no_warning():
    warnings.warn("never told")

def test_property(record_property):
    record_property("ranks", mpwatch.current_worker().world_size)

@pytest.mark.mark_of_xdist
def test_it_comes_with_another_name(): ...

@pytest.fixture(scope="module")
def last():
    yield
    print("said at the end")
    raise ValueError("at the end")

def test_last(last): ...
''',
        "--doctest-modules",
        "--junitxml=report.xml",
        "--setup-show",
        "-p",
        "xdist",
        conftest="""
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.mpwatch(2))
        item.name = item.name.replace("it_comes", "renamed")
""",
        # the name of a plugin that has no place in a rank
        xdist="""
def pytest_configure(config):
    config.addinivalue_line("markers", "mark_of_xdist: it is known")
""",
    )
    result.assert_outcomes(passed=5, failed=3, xfailed=1, errors=1)
    shown = fails(
        result,
        "E       ValueError: at the end",
        "*Captured stdout teardown*",
        "stdout of rank 0:",
        "said at the end",
        "*doctest*function*",
        "Expected:",
        "Got:",
        "    1",
        "in rank 1 of 2",
        "*_ test_no_such_fixture _*",
        "E       fixture 'nothing' not found",
        "in rank ? of 2",
        "as told",
        "in rank 1 of 2",
        "  rank 0: had returned",
        "*test_it.py:*: UserWarning: only told",
        "*= 3 failed, 5 passed, 1 xfailed, 1 warning, 1 error in *",
    )
    assert "hidden" not in shown
    assert shown.count("only told") == 2  # and its line
    assert (pytester.path / "report.xml").read_text().count('<property name="ranks" value="2"') == 1


def test_what_breaks_in_ranks_alone_is_told_by_each_test(run):
    result = run(
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
    fails(
        result,
        "*_ test_one _*",
        "E*ValueError: it breaks here",
        "E*in rank 0 of 1",
        "conftest.py:3: ValueError",
        "*_ test_two _*",
    )


def test_bad_marks_are_refused_by_name(run):
    result = run(
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
@pytest.mark.mpwatch(1, start_timeout=0.001)
def test_start(): ...
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
    result.assert_outcomes(failed=8)
    shown = fails(
        result,
        "mark mpwatch: nprocs must be at least 1, *not 0",
        "mark mpwatch: *unexpected keyword argument 'nproc'*",
        "mark mpwatch: takes one positional argument, nprocs, and not 2: (2, 3)",
        "mark mpwatch: has nprocs twice: 2 and 3",
        "mark mpwatch: the option 'logs' is the plugin's own; leave it out",
        "mark mpwatch: timeout must be a number of seconds, more than 0, not -1",
        "rank 0 never started: its interpreter was not ready after 0.001 s",
        "*_ test_launch _*",
        "*Too many open files*",
    )
    assert "mpwatch/" not in shown


@pytest.mark.parametrize("capture", ["no", "tee-sys"])
def test_live_output_has_the_ranks_before_it(run, capture):
    source = 'print("hello from", mpwatch.current_worker().rank)'
    result = run(f"@pytest.mark.mpwatch(2)\ndef test_it():\n    {source}\n", f"--capture={capture}")
    result.assert_outcomes(passed=1)
    assert {"[0] hello from 0", "[1] hello from 1"} <= {line.removeprefix("test_it.py ") for line in result.outlines}


def test_unittest_and_modules_of_one_name(run, pytester):
    for folder in ("one", "two"):
        (pytester.mkdir(folder) / "test_same.py").write_text(
            f"""
import unittest
import pytest
import mpwatch
class Test(unittest.TestCase):
    def setUp(self):
        self.size = mpwatch.current_worker().world_size
    @pytest.mark.mpwatch(2)
    def test_method(self):
        self.assertEqual((self.size, {folder!r}), (2, "one"))
"""
        )
    result = run("", "--import-mode=importlib", "one", "two")
    result.assert_outcomes(passed=1, failed=1)
    fails(result, "E*AssertionError: Tuples differ: (2, 'two') != (2, 'one')", "E*in rank ? of 2")


def test_without_a_mark_nothing_is_imported(run):
    result = run(
        """
def test_here():
    assert not [name for name in sys.modules if name.startswith(("mpwatch.watcher", "mpwatch.group", "torch"))]
"""
    )
    result.assert_outcomes(passed=1)


def test_ctrl_c_ends_pytest_and_the_ranks(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        test_it="""
import os, time
import pytest
import mpwatch

@pytest.mark.mpwatch(2)
def test_long():
    with open("at work", "w") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(60)
"""
    )
    os.mkfifo(pytester.path / "at work")
    program = [sys.executable, "-m", "pytest", *PLUGIN]
    with (
        open(os.open(pytester.path / "at work", os.O_RDWR)) as door,  # which never ends, as long as it is open
        subprocess.Popen(program, cwd=pytester.path, stdout=subprocess.PIPE, text=True) as process,
    ):
        pids = [door.readline().strip() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in out
    assert not any(is_alive(int(pid)) for pid in pids)
