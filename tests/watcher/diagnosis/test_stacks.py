"""The stacks in reports, and what interpreters print: real ranks whose stacks the watcher reads before it stops them."""

import os
import sys
import time

import pytest

import mpwatch
from support.process_state import SPAWN
from support.programs import call
from watcher.diagnosis import stack_functions

pytestmark = pytest.mark.usefixtures("_wait_for_all_stacks")


def error_of(fn, *args, nprocs=2, **options):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(fn, nprocs, args=args, **options)
    return caught.value


def error_beside(wait, **options):
    """Rank 1 raises while rank 0 is in `wait`."""
    return error_of(stack_functions.fails_while_rank_0_sleeps, wait, SPAWN.Value("i", 0), **options)


def test_stacks_of_a_rank_that_holds_the_gil_in_c():
    error = error_beside(stack_functions.holds_the_gil, grace_period=0.3)
    assert "rank 0: stopped by the watcher (stack_functions.py:" in str(error)
    assert "in holds_the_gil" in error.result.stacks[0]


def test_stacks_of_all_threads():
    error = error_beside(stack_functions.waits_with_many_threads)
    main, *others = error.result.stacks[0].split("\n\n")
    assert "in waits_with_many_threads" in main
    assert sum("in wait_in_a_thread" in other for other in others) > 100


def test_a_deep_stack_is_cut_and_is_no_reason_to_wait():
    failed_at = SPAWN.Value("d", 0.0)
    error = error_of(stack_functions.fails_beside_a_deep_stack, SPAWN.Barrier(2), failed_at)
    assert time.monotonic() - failed_at.value < 5
    assert 80 <= error.result.stacks[0].count("in recurses_then_waits") <= 100


def test_the_stack_of_a_crash_is_in_the_report_unless_the_function_has_faulthandler_write_it_to_a_file(tmp_path, capfd):
    error = error_of(stack_functions.crashes_with_faulthandler_enabled, nprocs=1)
    assert "in crashes_with_faulthandler_enabled" in error.root_cause.stack
    assert capfd.readouterr().err == ""
    path = tmp_path / "crash.txt"
    error = error_of(stack_functions.crashes_with_faulthandler_enabled, str(path), nprocs=1)
    assert error.root_cause.stack == ""
    assert "in crashes_with_faulthandler_enabled" in path.read_text()


# --- what interpreters print

SITE = """\
import os, sys
print("output of the site", file=sys.stderr)
if os.environ.get("RANK") == "1" and os.environ.get("REFUSE"):
    raise SystemExit("no licence")
"""


def start_ranks_that_a_site_refuses(site):
    os.environ["PYTHONPATH"] = os.pathsep.join([site, os.environ["PYTHONPATH"]])
    mpwatch.run(os.getpid, 2)
    os.environ["REFUSE"] = "1"
    result = mpwatch.run(os.getpid, 2, check=False)
    print(result.root_cause.kind.name, result.root_cause.rank, "no licence" in result.root_cause.stderr)
    print(mpwatch.RunFailedError(result))


def test_startup_output_of_an_interpreter(tmp_path):
    """It goes to stderr. If the rank never becomes ready, it is in the report instead."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    done = call(start_ranks_that_a_site_refuses, str(tmp_path))
    first, verdict, *rest = done.stdout.splitlines()
    assert first == "START 1 True"
    assert verdict == "rank 1 never started: its interpreter ended with exit code 1"
    assert rest[0] == "  what it printed:"
    assert "    SystemExit: no licence" in rest
    # two ranks, multiprocessing's resource tracker, and the other rank if it was called before it was stopped
    assert done.stderr in ("output of the site\n" * 3, "output of the site\n" * 4)


def write_to_stderr():
    def write():
        os.write(2, b"by number\n")
        print("by name", file=sys.stderr)
        return os.fstat(2)[:3]

    assert mpwatch.run(write, 1)[0] == os.fstat(2)[:3]


def test_ranks_have_the_stderr_of_the_caller():
    assert call(write_to_stderr).stderr == "by number\nby name\n"
