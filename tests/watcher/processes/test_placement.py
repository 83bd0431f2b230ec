"""Real ranks that are bound to CPUs and GPUs. Which CPUs and GPUs these are is in cores/placement."""

import os
import sys
from functools import partial

import pytest

import mpwatch
from mpwatch import Placement, WorkerGroup, events
from support.process_state import children

ALLOWED = sorted(os.sched_getaffinity(0))
need_two_cpus = pytest.mark.skipif(len(ALLOWED) < 2, reason="it needs two CPUs")


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(name, raising=False)


def choose_one(worker):
    return {ALLOWED[-1 - worker.local_rank]}


def get_affinity():
    return os.sched_getaffinity(0)


def get_affinities():
    """Return the affinity at the start of the interpreter, and those of all threads now."""
    return sys.affinity_at_start, *(os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task"))


def get_devices():
    return [os.environ[name] for name in ("ZE_AFFINITY_MASK", "LOCAL_RANK", "RANK")]


@need_two_cpus
@pytest.mark.linux
def test_ranks_are_bound_before_their_interpreter_starts(tmp_path):
    tmp_path.joinpath("sitecustomize.py").write_text("import os, sys\nsys.affinity_at_start = os.sched_getaffinity(0)\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = mpwatch.run(get_affinities, 2, placement=choose_one, env={"PYTHONPATH": path})
    assert [set(map(frozenset, seen)) for seen in result] == [{frozenset({ALLOWED[-1]})}, {frozenset({ALLOWED[-2]})}]


@need_two_cpus
@pytest.mark.linux
def test_cores_are_split_among_the_ranks_also_if_one_is_restarted():
    with WorkerGroup(2, placement="cores", scope="worker") as group:
        first, second = before = list(group.run(get_affinity))
        assert first | second == set(ALLOWED)
        assert not first & second
        with pytest.raises(mpwatch.RunFailedError):
            group.run(os._exit, (3,), ranks=1)
        assert list(group.run(get_affinity)) == before


@need_two_cpus
@pytest.mark.linux
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


@pytest.mark.skipif(hasattr(os, "sched_setaffinity"), reason="this system can bind a process to CPUs")
def test_a_system_that_cannot_bind_says_so():
    with pytest.raises(mpwatch.LaunchError, match="this system cannot bind a process to CPUs"):
        mpwatch.run(os.getpid, 1, placement="cores")


@pytest.mark.parametrize(
    ("placement", "error", "text"),
    [(lambda _: 1 // 0, ZeroDivisionError, "by zero"), (Placement(gpus="own"), ValueError, "but there is no GPU that")],
)
def test_a_bad_placement_starts_no_rank(placement, error, text):
    started = []
    for start in (partial(mpwatch.run, get_affinity), WorkerGroup):
        with pytest.raises(error, match=text):
            start(2, placement=placement, on_event=started.append)
    assert not [event for event in started if isinstance(event, events.WorkerStarted)]
    with pytest.raises(error, match=text):
        mpwatch.submit(get_affinity, 2, placement=placement).result()


def test_a_rank_sees_its_own_gpu_only(tmp_path, monkeypatch):
    """No GPU is needed: mpwatch takes those of Intel from the list of the user. The torch here is not imported."""
    tmp_path.joinpath("torch").mkdir()
    tmp_path.joinpath("torch", "__init__.py").touch()
    tmp_path.joinpath("torch", "version.py").write_text("cuda = hip = None\nxpu: Optional[str] = '20250301'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "2,1")
    own = Placement(gpus="own")
    assert list(mpwatch.run(get_devices, 2, placement=own)) == [["2", "0", "0"], ["1", "1", "1"]]
    with pytest.raises(ValueError, match="3 GPUs, one for each rank of this machine, but there are only 2 GPUs"):
        mpwatch.run(get_devices, 3, placement=own)
