"""Jobs through submitit: on this machine (LocalExecutor), and on a stand-in for SLURM that starts real processes."""

import logging
import os
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import mpwatch
from support.programs import ENV

submitit = pytest.importorskip("submitit")

from engines import cases, functions, slurm_stand_in  # noqa: E402
from engines.cases import wait_until  # noqa: E402
from mpwatch.events import CallStarted  # noqa: E402
from mpwatch.integrations.submitit import Job, run  # noqa: E402
from support.runs import at  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Let tasks import what this test module imports."""
    monkeypatch.setenv("PYTHONPATH", ENV["PYTHONPATH"])


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Install the stand-in, with three nodes. Yield its folder. Check after the test that nothing is left of its jobs."""
    folder = tmp_path / "slurm"
    monkeypatch.setenv("PATH", f"{slurm_stand_in.install(folder, 3)}{os.pathsep}{os.environ['PATH']}")
    yield folder
    submitit.SlurmJob.watcher.clear()
    wait_until(lambda: set(slurm_stand_in.list_states(folder).values()) <= set(slurm_stand_in.ENDED))
    assert not [pid for job in (folder / "jobs").iterdir() for pid in slurm_stand_in.list_processes(job)]


@pytest.fixture
def slurm_executor(slurm, tmp_path):
    yield make_executor(tmp_path, "slurm")
    check_nothing_left(tmp_path)


@pytest.fixture(params=["local", "slurm"])
def kind(request):
    if request.param == "slurm":
        request.getfixturevalue("slurm")
    return request.param


def make_executor(tmp_path, kind):
    executor = submitit.AutoExecutor(tmp_path / "jobs", cluster=kind)
    executor.update_parameters(timeout_min=5)
    return executor


def check_nothing_left(tmp_path):
    assert not list((tmp_path / "jobs").glob("mpwatch-*"))
    wait_until(lambda: not find_processes(tmp_path))


def find_processes(tmp_path):
    """Return the processes of jobs in this folder, except those of the stand-in."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            if str(tmp_path / "jobs") in words and "-c" not in words and entry.name != str(os.getpid()):
                found.append(int(entry.name))
    return found


class TestJob(cases.Cases):
    @pytest.fixture
    def run(self, kind, tmp_path):
        yield partial(run, make_executor(tmp_path, kind))
        check_nothing_left(tmp_path)

    @pytest.fixture
    def driver(self, kind, tmp_path):
        yield DRIVER, str(tmp_path / "jobs"), kind, "2"
        wait_until(lambda: not find_processes(tmp_path))


DRIVER = """
import submitit
from mpwatch.integrations.submitit import run
executor = submitit.AutoExecutor(sys.argv[1], cluster=sys.argv[2])
run(executor, show_pid, 2, nodes=int(sys.argv[3]))
"""


# ---- The queue


def test_ctrl_c_cancels_a_job_that_waits_in_the_queue(slurm, tmp_path):
    program = cases.start_driver(DRIVER, str(tmp_path / "jobs"), "slurm", "4", stderr=subprocess.PIPE)
    with program:
        wait_until(lambda: slurm_stand_in.list_states(slurm) == {"101": "PENDING"})
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=30)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert slurm_stand_in.list_states(slurm) == {"101": "CANCELLED"}
    check_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_job_waits_in_the_queue_for_longer_than_join_timeout(slurm, slurm_executor, caplog):
    """A warning comes after ten seconds. Then there are free nodes."""

    def free_the_nodes(record):
        slurm_stand_in.set_nodes(slurm, 2)
        return True

    slurm_stand_in.set_nodes(slurm, 0)
    logger = logging.getLogger("mpwatch")
    logger.addFilter(free_the_nodes)
    try:
        assert list(run(slurm_executor, functions.get_rank, 2, nodes=2, join_timeout=5.0)) == [0, 1, 2, 3]
    finally:
        logger.removeFilter(free_the_nodes)
    text = "no node of these jobs of submitit has connected to this program: 101. The job has waited for 10 s, and"
    assert caplog.messages[0].startswith(text)


# ---- Preemption


def count(folder):
    """Count until all ranks stop. The next run goes on there, and ends. Each writes at which steps it began and stopped."""
    path = folder / f"rank{functions.get_rank()}"
    steps = path.read_text().split() if path.exists() else []
    first = step = int(steps[-1]) if steps else 0
    while not steps and not mpwatch.should_stop(step):
        if step == 100:
            (folder / f"counting{functions.get_rank()}").touch()
        step += 1
    path.write_text(" ".join([*steps, str(first), str(step)]))
    return step


def preempt(slurm, folder):
    """Do what SLURM does when it takes a machine back, as soon as all four ranks count."""
    wait_until(lambda: all((folder / f"counting{rank}").exists() for rank in range(4)))
    slurm_stand_in.scancel(slurm, "101", "--signal", "USR2")


def check_steps(folder):
    steps = [(folder / f"rank{rank}").read_text().split() for rank in range(4)]
    assert all(line == steps[0] for line in steps)  # all ranks have stopped at the same step
    first, stopped, again, last = steps[0]
    assert (first, again, last) == ("0", stopped, stopped)


def run_and_preempt(slurm, executor, folder, **options):
    """Preempt the job when both of its nodes have called their ranks."""
    observe = at(CallStarted, partial(preempt, slurm, folder), 2)
    return run(executor, count, 2, nodes=2, args=(folder,), on_event=observe, **options)


def test_a_preempted_job_stops_at_the_same_step_and_run_submits_it_again(slurm, slurm_executor, tmp_path):
    assert run_and_preempt(slurm, slurm_executor, tmp_path).stopped_at is None
    assert sorted(slurm_stand_in.list_states(slurm)) == ["101", "102"]
    check_steps(tmp_path)


def test_without_requeues_the_result_says_where_all_ranks_have_stopped(slurm, slurm_executor, tmp_path):
    result = run_and_preempt(slurm, slurm_executor, tmp_path, max_requeues=0)
    assert list(result) == [result.stopped_at] * 4
    assert sorted(slurm_stand_in.list_states(slurm)) == ["101"]


# ---- Job objects


def test_submitit_queues_a_job_object_again_that_was_preempted(slurm, slurm_executor, tmp_path):
    slurm_executor.update_parameters(nodes=2, tasks_per_node=1)
    job = slurm_executor.submit(Job(count, 2, args=(tmp_path,)))
    preempt(slurm, tmp_path)
    values = {rank: value for result in job.results() for rank, value in result.return_values.items()}
    assert sorted(values) == [0, 1, 2, 3]
    assert len(set(values.values())) == 1
    check_steps(tmp_path)
    assert "Requeued job 101" in job.stderr() + job.stdout()


@pytest.mark.parametrize(
    ("nodes", "tasks", "text"),
    [
        (2, 1, "RankError: the disk is full"),
        (1, 2, "the number of its nodes is 1, but mpwatch needs one task"),
    ],
)
def test_a_failed_job_object_fails_in_submitit(slurm_executor, nodes, tasks, text):
    slurm_executor.update_parameters(nodes=nodes, tasks_per_node=tasks)
    with pytest.raises(submitit.core.utils.FailedJobError, match=text):
        slurm_executor.submit(Job(functions.raise_in_rank_3, 2)).results()


# ---- Mistakes


@pytest.mark.usefixtures("slurm")
def test_a_job_that_cannot_start_python_is_an_error(tmp_path):
    executor = submitit.SlurmExecutor(tmp_path / "jobs", python="/no/such/python")
    with pytest.raises(mpwatch.LaunchError, match=r"the engine could not start node .* has ended without a result"):
        run(executor, functions.get_rank, 2, nodes=2)
    check_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_requeues": -1}, ValueError, "max_requeues must be 0 or more, not -1"),
        ({"stop": [signal.SIGUSR2]}, ValueError, "stop has signals, but the nodes get no signals"),
        ({"epochs": 3}, TypeError, "epochs"),
    ],
)
def test_a_bad_option_is_named(tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        run(make_executor(tmp_path, "local"), functions.get_rank, 2, nodes=2, **options)
    check_nothing_left(tmp_path)


def test_a_bad_executor_is_named(tmp_path):
    with pytest.raises(TypeError, match="executor must be an executor of submitit, such as AutoExecutor, not str"):
        run("slurm", functions.get_rank, 2, nodes=2)
    with pytest.raises(ValueError, match="a DebugExecutor runs jobs one after the other in this process"):
        run(submitit.AutoExecutor(tmp_path, cluster="debug"), functions.get_rank, 2, nodes=2)
