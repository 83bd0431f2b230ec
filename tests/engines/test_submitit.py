"""Jobs through submitit: on this machine (LocalExecutor), and on a stand-in for SLURM that starts real processes."""

import logging
import os
import signal
import subprocess
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

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
KINDS = ("local", "slurm")


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


@pytest.fixture(params=KINDS)
def executor(request, tmp_path):
    if request.param == "slurm":
        request.getfixturevalue("slurm")
    yield make_executor(tmp_path, request.param)
    check_nothing_left(tmp_path)


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
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if str(tmp_path / "jobs") in words and "-c" not in words:
                found.append(int(entry.name))
    return found


def test_the_values_of_all_ranks_come_back(executor):
    cases.check_values(run(executor, functions.report, 2, nodes=2))


def test_a_failure_is_that_on_one_machine(executor):
    cases.check_failure(partial(run, executor))


def test_ctrl_c_stops_all_nodes(executor):
    cases.check_ctrl_c(partial(run, executor))


def test_a_lost_node_is_replaced(executor):
    cases.check_loss_of_a_node(partial(run, executor))


DRIVER = [
    "import submitit",
    "from mpwatch.integrations.submitit import run",
    "executor = submitit.AutoExecutor(sys.argv[1], cluster=sys.argv[2])",
    "run(executor, show_pid, 2, nodes=int(sys.argv[3]))",
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_end_with_the_driver(kind, request, tmp_path):
    if kind == "slurm":
        request.getfixturevalue("slurm")
    cases.check_death_of_driver(cases.start_driver(DRIVER, str(tmp_path / "jobs"), kind, "2"))
    wait_until(lambda: not find_processes(tmp_path))


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


def count_to(end, folder):
    """Count, from where the last run of this rank has stopped. Each rank writes at which steps it began and stopped."""
    rank = functions.get_rank()
    path = Path(folder, f"rank{rank}")
    steps = [int(word) for word in path.read_text().split()] if path.exists() else []
    first = steps[-1] if steps else 0
    step = first
    while step < end or not steps:  # the first time it counts until it has to stop
        if mpwatch.should_stop(step):
            break
        if step == 100 and not steps:
            Path(folder, f"counting{rank}").touch()
        step += 1
    path.write_text(" ".join(map(str, [*steps, first, step])))
    return step


def preempt(slurm, folder):
    """Do what SLURM does when it takes a machine back, as soon as all four ranks count."""
    wait_until(lambda: all((folder / f"counting{rank}").exists() for rank in range(4)))
    slurm_stand_in.scancel(slurm, "101", "--signal", "USR2")


def make_observer(slurm, folder):
    """Return an observer that preempts the job when both of its nodes have called their ranks."""
    started = []

    def observe(event):
        if isinstance(event, CallStarted):
            started.append(event)
            if len(started) == 2:
                preempt(slurm, folder)

    return observe


def check_steps(folder, ranks, end):
    steps = [list(map(int, (folder / f"rank{rank}").read_text().split())) for rank in range(ranks)]
    assert all(line == steps[0] for line in steps)  # all ranks have stopped at the same step
    first, stopped, again, last = steps[0]
    assert (first, again, last) == (0, stopped, stopped + end)


def test_a_preempted_job_stops_at_the_same_step_and_run_submits_it_again(slurm, slurm_executor, tmp_path):
    observe = make_observer(slurm, tmp_path)
    result = run(slurm_executor, count_to, 2, nodes=2, args=(0, str(tmp_path)), on_event=observe)
    assert result.stopped_at is None
    assert sorted(slurm_stand_in.list_states(slurm)) == ["101", "102"]
    check_steps(tmp_path, 4, 0)


def test_without_requeues_the_result_says_where_all_ranks_have_stopped(slurm, slurm_executor, tmp_path):
    observe = make_observer(slurm, tmp_path)
    result = run(slurm_executor, count_to, 2, nodes=2, args=(0, str(tmp_path)), on_event=observe, max_requeues=0)
    assert list(result) == [result.stopped_at] * 4
    assert sorted(slurm_stand_in.list_states(slurm)) == ["101"]


# ---- Job objects


def test_submitit_queues_a_job_object_again_that_was_preempted(slurm, slurm_executor, tmp_path):
    slurm_executor.update_parameters(nodes=2, tasks_per_node=1)
    job = slurm_executor.submit(Job(count_to, 2, args=(0, str(tmp_path))))
    preempt(slurm, tmp_path)
    values = {rank: value for result in job.results() for rank, value in result.return_values.items()}
    assert sorted(values) == [0, 1, 2, 3]
    assert len(set(values.values())) == 1
    check_steps(tmp_path, 4, 0)
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
