"""The stacks in reports, and what interpreters print: real ranks whose stacks the watcher reads before it stops them."""

import json
import os
import sys
import time
from pathlib import Path

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


def test_what_a_request_for_stacks_makes_a_rank_do_is_no_failure():
    """It interrupts code that waits for a signal, or for a system call in C."""
    result = error_beside(stack_functions.pauses_once).result
    assert (result.worker_states[0], set(result.failures)) == (mpwatch.WorkerState.STOPPED, {1})


def test_a_rank_that_executed_another_program_is_not_asked(tmp_path):
    error = error_of(stack_functions.execs_a_program_that_exits_at_sigterm, str(tmp_path / "ended"))
    assert error.root_cause.rank == 1
    assert (tmp_path / "ended").read_text() == "by SIGTERM"


def test_a_crash_of_a_forked_child_is_not_the_rank_s():
    error = error_beside(stack_functions.forks_a_child_that_crashes_and_waits)
    assert "in forks_a_child_that_crashes_and_waits" in error.result.stacks[0]
    killed = error_of(stack_functions.forks_a_child_that_crashes_and_is_killed, nprocs=1)
    assert (killed.root_cause.kind, killed.root_cause.stack) == (mpwatch.FailureKind.SIGNAL, "")


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


def run_with_unread_stderr(site):
    os.environ["PYTHONPATH"] = os.pathsep.join([site, os.environ["PYTHONPATH"]])
    unread = os.pipe()
    os.dup2(unread[1], 2)
    with pytest.raises(mpwatch.RunTimeoutError) as caught:
        mpwatch.run(os.getpid, 2, timeout=2, grace_period=0.5)
    print(str(caught.value).splitlines()[0])


@pytest.mark.slow
def test_much_startup_output_if_the_caller_s_stderr_is_not_read(tmp_path):
    """The rank blocks. The watcher does not, and the timeout holds."""
    (tmp_path / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ: os.write(2, b'x' * 400_000)\n")
    out = call(run_with_unread_stderr, str(tmp_path)).stdout
    assert out == "the run did not end within timeout=2 s: ranks 0-1 had not returned\n"


def close_descriptors_and_run(closed, path):
    def read_links():
        return [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]

    for fd in closed:
        os.close(fd)
    (found,) = mpwatch.run(read_links, 1)
    left = [fd for fd in (0, 1, 2) if os.path.exists(f"/proc/self/fd/{fd}")]
    Path(path).write_text(json.dumps([found, left]))


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)], ids=str)
def test_a_program_without_standard_descriptors(closed, tmp_path):
    """No descriptor of mpwatch takes their numbers, and they are closed again afterwards."""
    call(close_descriptors_and_run, closed, str(tmp_path / "found"))
    found, left = json.loads((tmp_path / "found").read_text())
    assert [found[fd] for fd in closed] == ["/dev/null"] * len(closed)
    assert left == sorted({0, 1, 2} - set(closed))


def write_to_stderr():
    def write():
        os.write(2, b"by number\n")
        print("by name", file=sys.stderr)
        return os.fstat(2)[:3]

    assert mpwatch.run(write, 1)[0] == os.fstat(2)[:3]


def test_ranks_have_the_stderr_of_the_caller():
    assert call(write_to_stderr).stderr == "by number\nby name\n"
