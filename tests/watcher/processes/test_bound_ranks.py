"""Real ranks that are bound to CPUs: from their first instruction on, after restarts, and without a trace in the caller."""

import os
import threading
from functools import partial
from multiprocessing import resource_tracker, spawn

import pytest

import mpwatch
from mpwatch import WorkerGroup, events
from mpwatch.integrations.accelerate import notebook_launcher
from mpwatch.watcher.processes.process import RankPopen
from mpwatch.watcher.processes.rank_environment import build_rank_setups
from mpwatch.wire.launch import LaunchInfo
from support.process_state import children
from support.simulated_machine import SimulatedMachine
from watcher.processes import bound_functions

ALLOWED = sorted(os.sched_getaffinity(0))
ALL = set(ALLOWED)
need_two_cpus = pytest.mark.skipif(len(ALLOWED) < 2, reason="it needs two CPUs")


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def choose_one(worker):
    return {ALLOWED[-1 - worker.local_rank]}


@need_two_cpus
def test_ranks_are_bound_before_their_interpreter_starts(tmp_path):
    tmp_path.joinpath("sitecustomize.py").write_text("import os, sys\nsys.affinity_at_start = os.sched_getaffinity(0)\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = mpwatch.run(bound_functions.get_affinities, 2, placement=choose_one, env={"PYTHONPATH": path})
    assert [set(map(frozenset, seen)) for seen in result] == [{frozenset({ALLOWED[-1]})}, {frozenset({ALLOWED[-2]})}]


@need_two_cpus
def test_cores_are_split_among_the_ranks():
    first, second = mpwatch.run(bound_functions.get_own_affinity, 2, placement="cores")
    assert first | second == ALL
    assert not first & second


def test_without_the_option_ranks_may_use_all_cpus():
    assert list(mpwatch.run(bound_functions.get_own_affinity, 2)) == [ALL, ALL]
    assert list(mpwatch.run(bound_functions.get_own_affinity, 1, placement="cores")) == [ALL]


def test_more_ranks_than_cpus_can_be_bound_by_a_function():
    result = mpwatch.run(bound_functions.get_own_affinity, len(ALLOWED) + 1, placement=lambda _: ALLOWED[:1])
    assert list(result) == [{ALLOWED[0]}] * (len(ALLOWED) + 1)


@need_two_cpus
def test_the_same_cpus_after_a_restart():
    result = mpwatch.run(bound_functions.fail_at_first, 2, placement=choose_one, max_restarts=1)
    assert list(result) == [(1, {ALLOWED[-1]}, "1"), (1, {ALLOWED[-2]}, "1")]


@need_two_cpus
def test_the_same_cpus_if_one_rank_is_restarted():
    policy = mpwatch.RestartPolicy(1, scope="worker")
    first, second = mpwatch.run(bound_functions.fail_at_first, 2, placement="cores", max_restarts=policy)
    assert (first[0], second[0]) == (1, 0)
    assert first[1] | second[1] == ALL
    assert not first[1] & second[1]


@need_two_cpus
def test_the_ranks_of_a_group_and_those_that_replace_them():
    with WorkerGroup(2, placement=choose_one, scope="worker") as group:
        before = list(group.run(bound_functions.get_own_affinity))
        with pytest.raises(mpwatch.RunFailedError):
            group.run(os._exit, (3,), ranks=1)
        assert list(group.run(bound_functions.get_own_affinity)) == before == [{ALLOWED[-1]}, {ALLOWED[-2]}]


@need_two_cpus
def test_other_ways_to_start_ranks():
    one = {ALLOWED[-1]}
    assert list(mpwatch.submit(bound_functions.get_own_affinity, 1, placement=choose_one).result()) == [one]
    assert list(mpwatch.map(bound_functions.get_affinity_of_item, [5], 1, placement=choose_one)) == [(5, one)]
    assert list(notebook_launcher(bound_functions.get_own_affinity, num_processes=1, placement=choose_one)) == [one]


@need_two_cpus
def test_all_other_threads_and_processes_of_the_caller_stay_unbound():
    """They are looked at while ranks run. One thread of the caller has an affinity of its own."""
    bound, end = threading.Event(), threading.Event()
    seen = {}

    def bind_itself():
        os.sched_setaffinity(0, {ALLOWED[0]})
        bound.set()
        end.wait()

    thread = threading.Thread(target=bind_itself)
    thread.start()
    bound.wait()
    resource_tracker.ensure_running()

    def look(event):
        if isinstance(event, events.WorkerReady) and event.ranks == (1,):
            for pid in [*map(int, os.listdir("/proc/self/task")), *children()]:
                seen[pid] = os.sched_getaffinity(pid)

    before = {pid: os.sched_getaffinity(pid) for pid in map(int, os.listdir("/proc/self/task"))}
    pids = set(mpwatch.run(os.getpid, 2, placement=lambda _: {ALLOWED[-1]}, on_event=look))
    after = {pid: os.sched_getaffinity(pid) for pid in map(int, os.listdir("/proc/self/task"))}
    end.set()
    thread.join()
    assert before == after
    assert before.pop(thread.native_id) == seen.pop(thread.native_id) == {ALLOWED[0]}
    others = {pid: cpus for pid, cpus in seen.items() if pid not in pids}
    assert len(others) >= len(before) + 3  # the watcher thread, the guardian, the resource tracker
    assert set(map(frozenset, others.values())) == {frozenset(ALLOWED)}


def test_a_process_that_cannot_be_started_leaves_the_thread_unbound(monkeypatch):
    monkeypatch.setattr(spawn, "_python_exe", b"/no/such/python")
    info, env = LaunchInfo({}, 0, 0, 0, 0, is_captured=False), dict(os.environ)
    for cpus, text in [({ALLOWED[0]}, "No such file"), ({1023}, "it cannot run on CPU 1023")]:
        with pytest.raises(OSError, match=text):
            RankPopen.start(info, name="a-rank", env=env, stdout=None, stderr=2, passed_fds=[], cpus=frozenset(cpus))
        assert os.sched_getaffinity(0) == ALL


def test_a_program_that_may_use_one_cpu_binds_within_it():
    """The CPUs of the calling thread count, and not those of the machine."""
    outcomes = []

    def run():
        os.sched_setaffinity(0, {ALLOWED[0]})
        outcomes.extend(mpwatch.run(bound_functions.get_own_affinity, 1, placement="cores"))
        outcomes.extend(mpwatch.run(bound_functions.get_own_affinity, 1, placement="numa"))
        with pytest.raises(ValueError, match=f"this process may use only CPU {ALLOWED[0]}; use nprocs=1 at most"):
            mpwatch.run(bound_functions.get_own_affinity, 2, placement="cores")
        outcomes.append("refused")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert outcomes == [{ALLOWED[0]}, {ALLOWED[0]}, "refused"]


def test_a_bad_binding_starts_no_rank():
    started = []
    too_many = len(ALLOWED) + 1
    for start in (partial(mpwatch.run, bound_functions.get_own_affinity), WorkerGroup):
        with pytest.raises(ValueError, match=f"needs a CPU for each of the {too_many} ranks"):
            start(too_many, placement="cores", on_event=started.append)
        with pytest.raises(
            TypeError, match=r"what the function in placement returned for rank 0 must be a set of CPU numbers, not None"
        ):
            start(2, placement=lambda _: None, on_event=started.append)
        with pytest.raises(ZeroDivisionError):
            start(2, placement=lambda _: 1 // 0, on_event=started.append)
    assert not [event for event in started if isinstance(event, events.WorkerStarted)]
    with pytest.raises(ValueError, match="needs a CPU for each of"):
        mpwatch.submit(bound_functions.get_own_affinity, too_many, placement="cores").result()


def test_a_rank_sees_its_own_gpu_only(tmp_path, monkeypatch):
    """The files of the machine are simulated; the processes are real. torch is built for CPUs, so the machine decides."""
    machine = SimulatedMachine(tmp_path).add_nvidia_gpus([0, 0, 0])
    build = partial(build_rank_setups, root=machine.root)
    monkeypatch.setattr("mpwatch.watcher.watcher_thread.build_rank_setups", build)
    result = mpwatch.run(bound_functions.get_devices, 2, placement=mpwatch.Placement(gpus="own"))
    assert list(result) == [["0", "0", "0"], ["1", "1", "1"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    with WorkerGroup(2, placement=mpwatch.Placement(gpus="own")) as group:
        assert list(group.run(bound_functions.get_devices)) == [["2", "0", "0"], ["1", "1", "1"]]
    with pytest.raises(ValueError, match="3 GPUs, one for each rank of this machine, but there are only 2 GPUs"):
        mpwatch.run(bound_functions.get_devices, 3, placement=mpwatch.Placement(gpus="own"))
