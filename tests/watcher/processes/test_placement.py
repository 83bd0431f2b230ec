"""Real ranks that are bound to CPUs and GPUs. Which CPUs and GPUs these are is in cores/placement."""

import os
from functools import partial

import pytest

import mpwatch
from mpwatch import Placement, WorkerGroup, events
from mpwatch.integrations.accelerate import notebook_launcher
from support.process_state import children
from watcher.processes import bound_functions
from watcher.processes.bound_functions import get_affinity

ALLOWED = sorted(os.sched_getaffinity(0))
need_two_cpus = pytest.mark.skipif(len(ALLOWED) < 2, reason="it needs two CPUs")


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
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
def test_cores_are_split_among_the_ranks_also_if_one_is_restarted():
    policy = mpwatch.RestartPolicy(1, scope="worker")
    first, second = mpwatch.run(bound_functions.fail_at_first, 2, placement="cores", max_restarts=policy)
    assert (first[0], second[0]) == (1, 0)
    assert first[1] | second[1] == set(ALLOWED)
    assert not first[1] & second[1]


@need_two_cpus
def test_the_ranks_of_a_group_and_those_that_replace_them():
    with WorkerGroup(2, placement=choose_one, scope="worker") as group:
        before = list(group.run(get_affinity))
        with pytest.raises(mpwatch.RunFailedError):
            group.run(os._exit, (3,), ranks=1)
        assert list(group.run(get_affinity)) == before == [{ALLOWED[-1]}, {ALLOWED[-2]}]


@need_two_cpus
def test_other_ways_to_start_ranks():
    one = {ALLOWED[-1]}
    assert list(mpwatch.submit(get_affinity, 1, placement=choose_one).result()) == [one]
    assert list(mpwatch.map(bound_functions.get_affinity_of_item, [5], 1, placement=choose_one)) == [(5, one)]
    assert list(notebook_launcher(get_affinity, num_processes=1, placement=choose_one)) == [one]


@need_two_cpus
def test_all_other_threads_and_processes_of_the_caller_stay_unbound():
    """They are looked at while a rank runs."""
    seen = {}

    def look(event):
        if isinstance(event, events.WorkerReady):
            seen.update((pid, os.sched_getaffinity(pid)) for pid in [*map(int, os.listdir("/proc/self/task")), *children()])

    (pid,) = mpwatch.run(os.getpid, 1, placement=choose_one, on_event=look)
    assert seen.pop(pid) == {ALLOWED[-1]}
    assert len(seen) >= 4  # this thread and that of the watcher, the guardian, multiprocessing's resource tracker
    assert set(map(frozenset, seen.values())) == {frozenset(ALLOWED)}


@pytest.mark.parametrize(
    ("nprocs", "placement", "error", "text"),
    [
        (len(ALLOWED) + 1, "cores", ValueError, rf"needs a CPU for each of the {len(ALLOWED) + 1} ranks"),
        (
            2,
            lambda _: None,
            TypeError,
            r"the function in placement returned for rank 0 must be a set of CPU numbers, not None",
        ),
        (2, lambda _: 1 // 0, ZeroDivisionError, "by zero"),
        (2, Placement(gpus="own"), ValueError, "but there is no GPU that the ranks can see"),
    ],
)
def test_a_bad_placement_starts_no_rank(nprocs, placement, error, text):
    started = []
    for start in (partial(mpwatch.run, get_affinity), WorkerGroup):
        with pytest.raises(error, match=text):
            start(nprocs, placement=placement, on_event=started.append)
    assert not [event for event in started if isinstance(event, events.WorkerStarted)]
    with pytest.raises(error, match=text):
        mpwatch.submit(get_affinity, nprocs, placement=placement).result()


def test_a_rank_sees_its_own_gpu_only(tmp_path, monkeypatch):
    """No GPU is needed: mpwatch takes those of Intel from the list of the user. The torch here is not imported."""
    tmp_path.joinpath("torch").mkdir()
    tmp_path.joinpath("torch", "__init__.py").touch()
    tmp_path.joinpath("torch", "version.py").write_text("cuda = hip = None\nxpu: Optional[str] = '20250301'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "2,1")
    own = Placement(gpus="own")
    assert list(mpwatch.run(bound_functions.get_devices, 2, placement=own)) == [["2", "0", "0"], ["1", "1", "1"]]
    with pytest.raises(ValueError, match="3 GPUs, one for each rank of this machine, but there are only 2 GPUs"):
        mpwatch.run(bound_functions.get_devices, 3, placement=own)
