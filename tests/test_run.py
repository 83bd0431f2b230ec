"""Runs in which no rank fails: what a rank finds, what comes back, and what is left."""

import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time

import pytest

import mpwatch
from support import failing, functions, process_state
from support.process_state import SPAWN
from support.programs import python


def test_values_come_back_by_rank():
    result = mpwatch.run(functions.rank, 3, timeout=3e9, grace_period=1e9)  # limits may be of any length
    assert list(result) == [0, 1, 2]
    assert (len(result), result[2], result[-1], result[1:], result[::-1], result[5:]) == (3, 2, 2, [1, 2], [2, 1, 0], [])
    assert dict(result.items()) == result.return_values == {0: 0, 1: 1, 2: 2}
    assert (result.state, result.failures) == (mpwatch.WorkerState.SUCCEEDED, {})
    assert [worker.rank for worker in result.workers] == [0, 1, 2]
    for rank in (3, -4):
        with pytest.raises(IndexError, match=f"there is no rank {rank}; the number of ranks is 3"):
            result[rank]


def test_anything_callable():
    """A lambda, a partial, a callable object, a bound method, and a builtin."""
    lambda_, partial = lambda x, plus=1: 2 * x + plus, functools.partial(functions.double, plus=1)
    with mpwatch.WorkerGroup(1) as group:
        for fn in (lambda_, partial, functions.Adder(4), functions.Adder(4).add):
            assert list(group.run(fn, [3])) == [7]
        assert list(group.run(sum, ([3, 4],))) == [7]


def test_the_environment_is_set_before_any_import(tmp_path, monkeypatch):
    (tmp_path / "environment.py").write_text("import os\nSEEN = dict(os.environ)\ndef get(): return SEEN\n")
    monkeypatch.syspath_prepend(tmp_path)
    import environment

    expected = {  # tests/trainers/test_moving.py has the variables of torchrun
        "RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        "MORE": "yes",
    }
    seen = mpwatch.run(environment.get, 2, env={"MORE": "yes"})
    assert {name: seen[0].get(name) for name in expected} == expected
    assert (seen[1]["RANK"], seen[1]["LOCAL_RANK"], seen[1]["WORLD_SIZE"]) == ("1", "1", "2")
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    assert seen[0]["MASTER_PORT"].isdigit()
    assert len(seen[0]["TORCHELASTIC_RUN_ID"]) > 8
    assert "RANK" not in os.environ


def test_env_may_be_a_function_of_the_worker_and_wins_over_the_programs_own(monkeypatch):
    def observe():
        names = ("MASTER_ADDR", "RANK", "OMP_NUM_THREADS", "MASTER_PORT")
        return [os.environ[name] for name in names], mpwatch.current_worker().master_port

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("RANK", "12")  # left by an outer launcher
    result = mpwatch.run(observe, 2, env=lambda worker: {"MASTER_PORT": "29999", "MASTER_ADDR": f"host{worker.rank}"})
    assert list(result) == [([f"host{rank}", str(rank), "7", "29999"], 29999) for rank in range(2)]


def test_current_worker_describes_the_rank():
    def describe():
        worker = mpwatch.current_worker()
        worker.state["seen"] = True
        assert mpwatch.current_worker() is worker
        return worker, mpwatch.current_worker().state

    result = mpwatch.run(describe, 2)
    for rank, (worker, state) in enumerate(result):
        assert worker == result.workers[rank]
        assert (worker.rank, worker.local_rank, worker.world_size, worker.role) == (rank, rank, 2, "default")
        assert state == {"seen": True}
    with pytest.raises(RuntimeError, match="outside a rank"):
        mpwatch.current_worker()


def test_ranks_are_processes_of_multiprocessing_with_unblocked_signals():
    def describe():
        me, parent = multiprocessing.current_process(), multiprocessing.parent_process()
        leads_group = os.getpgrp() == os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return me.name, parent.pid, parent.is_alive(), os.getppid(), leads_group, sys.stdin.read(), mask

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        (found,) = mpwatch.run(describe, 1)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before | {signal.SIGTERM, signal.SIGUSR1}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert found == ("mpwatch-rank-0", os.getpid(), True, os.getpid(), True, "", set())


def test_objects_of_multiprocessing_are_shared():
    mine, theirs = SPAWN.Pipe()
    queue, lock, event, value = SPAWN.SimpleQueue(), SPAWN.Lock(), SPAWN.Event(), SPAWN.Value("i", 0)

    def use(connection, queue, lock, event, value):
        with lock:
            value.value += 1
        if mpwatch.current_worker().rank == 0:
            connection.send("through a connection")
            queue.put("through a queue")
            event.set()
        assert event.wait(60)

    with mine, theirs:
        mpwatch.run(use, 2, args=(theirs, queue, lock, event, value))
        assert mine.recv() == "through a connection"
    assert queue.get() == "through a queue"
    assert value.value == 2
    queue.close()


def test_a_run_inside_a_rank():
    assert list(mpwatch.run(lambda: [*mpwatch.run(functions.rank, 2), functions.rank()], 2)) == [[0, 1, 0], [0, 1, 1]]


def test_sys_exit_0_is_a_success_without_a_value():
    assert list(mpwatch.run(sys.exit, 2, args=(mpwatch.PerRank([0, None]),))) == [None, None]


@pytest.mark.parametrize("grace_period", [0, 10])
def test_ranks_run_exit_hooks_and_wait_for_threads(grace_period, tmp_path, caplog):
    def register_hooks(path):
        import atexit

        thread = threading.Thread(target=lambda: threading.main_thread().join() or (path / "thread").touch())
        thread.start()
        atexit.register((path / "atexit").touch)

    mpwatch.run(register_hooks, 1, args=(tmp_path,), grace_period=grace_period)
    assert {path.name for path in tmp_path.iterdir()} == {"thread", "atexit"}
    assert caplog.text == ""


def test_a_forked_child_of_a_rank_sends_no_value():
    assert list(mpwatch.run(lambda: os.fork() == 0, 1)) == [False]


@pytest.mark.slow
def test_a_hundred_ranks():
    assert list(mpwatch.run(functions.rank, 100)) == list(range(100))


def test_the_timeout_is_for_the_whole_run_start_included():
    with pytest.raises(mpwatch.RunTimeoutError):
        mpwatch.run(functions.rank, 1, timeout=0.2, env=lambda worker: time.sleep(0.3) or {})


@pytest.mark.slow
def test_nothing_grows_over_many_runs():
    """Every fourth run fails. The leak check after each test looks for the rest."""
    for n in range(8 + process_state.RUNS):
        if n == 8:
            gc.collect()
            before = resident_megabytes(), process_state.state()
        if n % 4:
            mpwatch.run(functions.rank, 1)
        else:
            with pytest.raises(mpwatch.RunFailedError):
                mpwatch.run(failing.raises_value_error, 1)
    gc.collect()
    after = resident_megabytes(), process_state.state()
    assert after[1] == before[1]
    assert after[0] - before[0] < 2


def resident_megabytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


SCRIPT = """
import sys, mpwatch
from support import functions
print("the script is run")
result = mpwatch.run(functions.rank, 1)
assert not {'torch', 'numpy'} & set(sys.modules)
print(*mpwatch.run(functions.list_modules, 1)[0])
"""


def test_a_rank_imports_only_what_the_function_needs_and_not_the_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    first, modules = python(str(tmp_path / "script.py")).stdout.splitlines()
    assert first == "the script is run"
    assert not set(modules.split()) & {"torch", "cloudpickle", "tblib", "numpy", "dataclasses", "tempfile"}
