"""Jobs through submitit: on this machine (LocalExecutor), and on a stand-in for SLURM that starts real processes."""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import mpwatch
from support.process_state import is_alive
from support.programs import ENV

submitit = pytest.importorskip("submitit")

from engines import cases, slurm_stand_in  # noqa: E402
from engines.cases import find_parent, wait_until  # noqa: E402
from mpwatch.cluster import queue_wait  # noqa: E402
from mpwatch.integrations.submitit import Job, engine, run  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
KINDS = ("local", "slurm")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Let tasks import what this test module imports."""
    monkeypatch.setenv("PYTHONPATH", ENV["PYTHONPATH"])


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Install the stand-in, with three nodes. Yield its folder."""
    folder = tmp_path / "slurm"
    monkeypatch.setenv("PATH", f"{slurm_stand_in.install(folder, 3)}{os.pathsep}{os.environ['PATH']}")
    yield folder
    submitit.SlurmJob.watcher.clear()
    wait_until(lambda: set(slurm_stand_in.list_states(folder).values()) <= set(slurm_stand_in.ENDED))
    assert not [pid for job in (folder / "jobs").iterdir() for pid in slurm_stand_in.list_processes(job)]


@pytest.fixture(params=KINDS)
def executor(request, tmp_path):
    """Make an executor. Check after the test that nothing is left of its jobs."""
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


class RankError(Exception):
    """Raised by a rank."""


def report_pid(factor=1):
    worker = mpwatch.current_worker()
    return worker.rank, os.getpid(), os.getppid(), np.full(100_000, factor * worker.rank)


def fail_on_rank_3():
    if mpwatch.current_worker().rank == 3:
        raise RankError("the disk is full")
    signal.pause()


def test_the_values_of_all_ranks_come_back(executor):
    result = run(executor, report_pid, 2, nodes=2, args=(2,))
    assert [rank for rank, *_ in result] == [0, 1, 2, 3]
    assert [int(array[-1]) for *_, array in result] == [0, 2, 4, 6]
    assert len({watcher for _, _, watcher, _ in result}) == 2
    assert not any(is_alive(pid) for _, pid, *_ in result)
    result[0][-1][0] = 7  # it can be written to


def test_a_failure_is_that_of_the_rank(executor):
    with pytest.raises(mpwatch.RunFailedError, match=r"rank 3 .*failed first: RankError: the disk is full") as caught:
        run(executor, fail_on_rank_3, 2, nodes=2)
    assert type(caught.value.__cause__) is RankError
    assert caught.value.__cause__.__traceback__.tb_frame.f_code.co_name == "fail_on_rank_3"


def interrupt(event):
    if isinstance(event, mpwatch.events.CallStarted):
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_all_nodes(executor):
    with pytest.raises(KeyboardInterrupt):
        run(executor, signal.pause, 2, nodes=2, on_event=interrupt)


def test_ctrl_c_three_times_leaves_no_job(executor, monkeypatch):
    """The third one interrupts the wait for the end of the jobs. The fixture waits until all processes have ended."""
    waits = iter([cases.interrupt])
    wait_until_done = engine._wait_until_done

    def wait(jobs, seconds):
        next(waits, wait_until_done)(jobs, seconds)

    monkeypatch.setattr(engine, "_wait_until_done", wait)
    with pytest.raises(KeyboardInterrupt):
        run(executor, signal.pause, 2, nodes=2, on_event=cases.interrupt)
    assert not list(waits)


def test_a_lost_node_is_replaced(executor):
    killed = []

    def kill_a_watcher(event):
        if isinstance(event, mpwatch.events.WorkerStarted) and not killed:
            killed.append(find_parent(event.pid))
            os.kill(killed[0], signal.SIGKILL)

    result = run(executor, wait_for_second_start, 1, nodes=2, max_restarts=2, node_timeout=3.0, on_event=kill_a_watcher)
    assert [count for count, _ in result] == [1, 1]
    assert killed[0] not in {watcher for _, watcher in result}


def wait_for_second_start():
    if mpwatch.current_worker().restart_count == 0:
        signal.pause()
    return mpwatch.current_worker().restart_count, os.getppid()


@pytest.mark.slow
def test_a_job_whose_nodes_are_all_lost_is_restarted(executor):
    cases.check_loss_of_all_nodes(partial(run, executor))


@pytest.mark.slow
def test_large_results_come_back(executor):
    result = run(executor, make_large_array, 1, nodes=2)
    assert [int(array[-1]) for array in result] == [0, 1]
    assert sum(array.nbytes for array in result) == 200_000_000


def make_large_array():
    return np.full(12_500_000, mpwatch.current_worker().rank, dtype="int64")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_runs_leave_nothing(executor, tmp_path):
    counts = []
    for _ in range(20):
        assert [rank for rank, *_ in run(executor, report_pid, 1, nodes=2)] == [0, 1]
        check_nothing_left(tmp_path)
        counts.append(len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[1]


@pytest.mark.slow
def test_a_job_that_slurm_starts_later_becomes_a_node(slurm, tmp_path):
    slurm_stand_in.set_nodes(slurm, 1)

    def free_a_node(event):
        if isinstance(event, mpwatch.events.CallStarted):
            slurm_stand_in.set_nodes(slurm, 2)

    result = run(make_executor(tmp_path, "slurm"), wait_for_two_nodes, 1, nodes=(1, 2), on_event=free_a_node)
    assert list(result) == [2, 2]
    check_nothing_left(tmp_path)


def wait_for_two_nodes():
    if mpwatch.current_worker().world_size == 1:
        signal.pause()
    return mpwatch.current_worker().world_size


def test_ctrl_c_cancels_a_job_that_waits_in_the_queue(slurm, tmp_path):
    program = cases.start_driver(DRIVER, str(tmp_path / "jobs"), "slurm", "4", stderr=subprocess.PIPE)
    with program:
        wait_until(lambda: slurm_stand_in.list_states(slurm) == {"101": "PENDING"})
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=30)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert slurm_stand_in.list_states(slurm) == {"101": "CANCELLED"}
    check_nothing_left(tmp_path)


def test_a_job_waits_in_the_queue_for_longer_than_join_timeout(slurm, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(queue_wait, "FIRST_REPORT_SECONDS", 6.0)
    take_report = queue_wait.QueueWait.take_report

    def free_the_nodes(self, what, now):
        slurm_stand_in.set_nodes(slurm, 2)
        return take_report(self, what, now)

    slurm_stand_in.set_nodes(slurm, 0)
    monkeypatch.setattr(queue_wait.QueueWait, "take_report", free_the_nodes)
    result = run(make_executor(tmp_path, "slurm"), report_pid, 2, nodes=2, join_timeout=5.0)
    assert [rank for rank, *_ in result] == [0, 1, 2, 3]
    assert caplog.messages[0].startswith(
        "no node of these jobs of submitit has connected to this program: 101. The job has waited for 6 s, and"
    )
    check_nothing_left(tmp_path)


def test_queue_timeout_limits_the_wait_in_the_queue(slurm, tmp_path):
    slurm_stand_in.set_nodes(slurm, 0)
    with pytest.raises(mpwatch.LaunchError, match=r"to this program: 101\. The job has waited for 2 s \(queue_timeout\)"):
        run(make_executor(tmp_path, "slurm"), report_pid, 2, nodes=2, queue_timeout=2.0)
    assert slurm_stand_in.list_states(slurm) == {"101": "CANCELLED"}
    check_nothing_left(tmp_path)


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


def count_to(end, folder):
    """Count, from where the last run of this rank has stopped. Each rank writes at which steps it began and stopped."""
    rank = mpwatch.current_worker().rank
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


def preempt(slurm, folder, ranks):
    """Do what SLURM does when it takes a machine back, as soon as all ranks count."""
    wait_until(lambda: all((folder / f"counting{rank}").exists() for rank in range(ranks)))
    slurm_stand_in.scancel(slurm, "101", "--signal", "USR2")


def check_steps(folder, ranks, end):
    steps = [list(map(int, (folder / f"rank{rank}").read_text().split())) for rank in range(ranks)]
    assert all(line == steps[0] for line in steps)  # all ranks have stopped at the same step
    first, stopped, again, last = steps[0]
    assert (first, again, last) == (0, stopped, stopped + end)


def test_a_preempted_job_stops_at_the_same_step_and_run_submits_it_again(slurm, tmp_path):
    executor = make_executor(tmp_path, "slurm")

    started = []

    def watch(event):
        if isinstance(event, mpwatch.events.CallStarted):
            started.append(event)
            if len(started) == 2:
                preempt(slurm, tmp_path, 4)

    result = run(executor, count_to, 2, nodes=2, args=(0, str(tmp_path)), on_event=watch)
    assert result.stopped_at is None
    assert sorted(slurm_stand_in.list_states(slurm)) == ["101", "102"]
    check_steps(tmp_path, 4, 0)
    check_nothing_left(tmp_path)


def test_a_job_that_is_preempted_while_its_ranks_start_is_submitted_again(slurm, tmp_path):
    signalled = []

    def preempt_at_once(event):
        if isinstance(event, mpwatch.events.WorkerStarted) and not signalled:
            signalled.append(event)
            slurm_stand_in.scancel(slurm, "101", "--signal", "USR2")

    result = run(make_executor(tmp_path, "slurm"), stop_or_return_job, 2, nodes=2, on_event=preempt_at_once)
    assert list(result) == ["102"] * 4
    check_nothing_left(tmp_path)


def stop_or_return_job():
    job = os.environ["SLURM_JOB_ID"]
    while job == "101" and not mpwatch.should_stop(0):
        pass
    return job


def test_without_requeues_the_result_says_where_all_ranks_have_stopped(slurm, tmp_path):
    executor = make_executor(tmp_path, "slurm")
    started = []

    def watch(event):
        if isinstance(event, mpwatch.events.CallStarted):
            started.append(event)
            if len(started) == 2:
                preempt(slurm, tmp_path, 4)

    result = run(executor, count_to, 2, nodes=2, args=(0, str(tmp_path)), on_event=watch, max_requeues=0)
    assert list(result) == [result.stopped_at] * 4
    assert sorted(slurm_stand_in.list_states(slurm)) == ["101"]


def test_submitit_queues_a_job_object_again_that_was_preempted(slurm, tmp_path):
    executor = make_executor(tmp_path, "slurm")
    executor.update_parameters(nodes=2, tasks_per_node=1)
    job = executor.submit(Job(count_to, 2, args=(0, str(tmp_path))))
    preempt(slurm, tmp_path, 4)
    values = {rank: value for result in job.results() for rank, value in result.return_values.items()}
    assert sorted(values) == [0, 1, 2, 3]
    assert len(set(values.values())) == 1
    check_steps(tmp_path, 4, 0)
    assert "Requeued job 101" in job.stderr() + job.stdout()


@pytest.mark.slow
def test_a_job_object_on_this_machine_goes_on_after_its_time_limit(tmp_path):
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(tasks_per_node=2, timeout_min=1, signal_delay_s=45)  # its signal comes after 15 seconds
    job = executor.submit(Job(count_to, 1, args=(0, str(tmp_path))))
    results = job.results()
    assert [sorted(result.return_values) for result in results] == [[0], [1]]
    check_steps(tmp_path, 2, 0)
    check_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_job_object_goes_on_without_a_lost_node(slurm, tmp_path):
    executor = make_executor(tmp_path, "slurm")
    executor.update_parameters(nodes=2, tasks_per_node=1, slurm_srun_args=["--kill-on-bad-exit=0"])
    job = executor.submit(Job(wait_for_loss, 1, args=(str(tmp_path),), min_nodes=1, node_timeout=3.0))
    wait_until(lambda: all((tmp_path / f"watcher{task}").exists() for task in range(2)))
    os.kill(int((tmp_path / "watcher1").read_text()), signal.SIGKILL)
    assert list(job.task(0).result()) == [1]


def wait_for_loss(folder):
    size = mpwatch.current_worker().world_size
    if size == 2:
        path = Path(folder, f"watcher{os.environ['SLURM_PROCID']}")
        path.with_suffix(".new").write_text(str(os.getppid()))
        path.with_suffix(".new").replace(path)
        signal.pause()
    return size


def test_a_failed_job_object_fails_in_submitit(slurm, tmp_path):
    executor = make_executor(tmp_path, "slurm")
    executor.update_parameters(nodes=2, tasks_per_node=1)
    job = executor.submit(Job(fail_on_rank_3, 2))
    with pytest.raises(submitit.core.utils.FailedJobError, match="RankError: the disk is full"):
        job.results()


def test_several_tasks_on_a_node_are_an_error(slurm, tmp_path):
    executor = make_executor(tmp_path, "slurm")
    executor.update_parameters(nodes=1, tasks_per_node=2)
    job = executor.submit(Job(report_pid, 2))
    with pytest.raises(submitit.core.utils.FailedJobError, match="the number of its nodes is 1, but mpwatch needs one task"):
        job.results()


def test_a_job_that_cannot_start_python_is_an_error(slurm, tmp_path):
    executor = submitit.SlurmExecutor(tmp_path / "jobs", python="/no/such/python")
    with pytest.raises(mpwatch.LaunchError, match=r"the engine could not start node .* has ended without a result"):
        run(executor, report_pid, 2, nodes=2)
    check_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"nodes": 0}, ValueError, "^nodes must be"),
        ({"max_requeues": -1}, ValueError, "max_requeues must be 0 or more, not -1"),
        ({"stop": [signal.SIGUSR2]}, ValueError, "stop has signals, but the nodes get no signals"),
        ({"epochs": 3}, TypeError, "epochs"),
        ({"grace_period": "long"}, TypeError, "grace_period must be a number of seconds, not 'long'"),
        ({"args": (1, 2, 3)}, TypeError, "argument"),
    ],
)
def test_a_bad_option_is_named(tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        run(make_executor(tmp_path, "local"), report_pid, 2, **{"nodes": 2, **options})
    check_nothing_left(tmp_path)


def test_a_bad_executor_is_named(tmp_path):
    with pytest.raises(TypeError, match="executor must be an executor of submitit, such as AutoExecutor, not str"):
        run("slurm", report_pid, 2, nodes=2)
    with pytest.raises(ValueError, match="a DebugExecutor runs jobs one after the other in this process"):
        run(submitit.AutoExecutor(tmp_path, cluster="debug"), report_pid, 2, nodes=2)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"stop": [signal.SIGUSR2]}, TypeError, "a Job has no option 'stop'"),
        ({"grace_period": -1}, ValueError, "grace_period must be a number of seconds"),
        ({"min_nodes": -1}, ValueError, "nnodes"),
        ({"epochs": 3}, TypeError, "epochs"),
    ],
)
def test_a_bad_option_of_a_job_object_is_named(options, error, text):
    with pytest.raises(error, match=text):
        Job(report_pid, 2, **options)
