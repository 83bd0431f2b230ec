"""End to end: runs in which no rank fails."""

import asyncio
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

import mpwatch
from support import failing, functions, process_state

SPAWN = multiprocessing.get_context("spawn")


def test_values_come_back_by_rank():
    result = mpwatch.run(functions.rank, 3)
    assert list(result) == [0, 1, 2]
    assert result[2] == 2
    assert len(result) == 3
    assert isinstance(result, Sequence)
    assert (result[-1], result[1:], result[::-1], result[5:]) == (2, [1, 2], [2, 1, 0], [])
    assert (list(reversed(result)), result.index(1), 3 in result) == ([2, 1, 0], 1, False)
    assert dict(result.items()) == result.return_values == {0: 0, 1: 1, 2: 2}
    assert list(result.values()) == [0, 1, 2]
    assert result.state is mpwatch.WorkerState.SUCCEEDED
    assert result.failures == {}
    assert [worker.rank for worker in result.workers] == [0, 1, 2]
    for rank in (3, -4):
        with pytest.raises(IndexError, match=f"there is no rank {rank}; the number of ranks is 3"):
            result[rank]
    with pytest.raises(TypeError):
        result["2"]


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [
        (functions.double, (3,), {"plus": 1}),
        (lambda x: 2 * x + 1, (3,), None),
        (functools.partial(functions.double, plus=1), (3,), None),
        (functions.Adder(4), (3,), None),
        (functions.Adder(4).add, [3], {}),
        (sum, ([3, 4],), None),
    ],
    ids=["function", "lambda", "partial", "callable object", "bound method", "builtin"],
)
def test_anything_callable(fn, args, kwargs):
    assert list(mpwatch.run(fn, 1, args=args, kwargs=kwargs)) == [7]


def test_closures_and_classes_defined_in_a_function():
    base = 5

    class Local:
        value = base

    def outer():
        return Local, [base + n for n in range(2)]

    cls, values = mpwatch.run(outer, 1)[0]
    assert cls is Local
    assert values == [5, 6]


def test_values_that_only_cloudpickle_can_send():
    (function,) = mpwatch.run(lambda: lambda x: x + 1, 1)
    assert function(1) == 2


def test_the_environment_is_set_before_any_import(tmp_path, monkeypatch):
    (tmp_path / "environment.py").write_text("import os\nSEEN = dict(os.environ)\ndef get(): return SEEN\n")
    monkeypatch.syspath_prepend(tmp_path)
    import environment

    seen = mpwatch.run(environment.get, 2, env={"MORE": "yes"})
    first, second = ({name: env.get(name) for name in [*functions.VARIABLES, "MORE"]} for env in seen)
    assert first.pop("MASTER_PORT").isdigit()
    assert len(first.pop("TORCHELASTIC_RUN_ID")) > 8
    assert first == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "0",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        "MORE": "yes",
    }
    assert (second["RANK"], second["LOCAL_RANK"]) == ("1", "1")
    assert "RANK" not in os.environ


def test_env_may_be_a_function_of_the_worker(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("RANK", "12")  # left by an outer launcher
    result = mpwatch.run(
        functions.get_environment, 2, env=lambda worker: {"ROLE_X": "x", "MASTER_ADDR": f"host{worker.rank}"}
    )
    assert [env["MASTER_ADDR"] for env in result] == ["host0", "host1"]
    assert [env["RANK"] for env in result] == ["0", "1"]
    assert [env["OMP_NUM_THREADS"] for env in result] == ["7", "7"]


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


def test_ranks_are_processes_of_multiprocessing():
    def describe():
        me, parent = multiprocessing.current_process(), multiprocessing.parent_process()
        return me.name, parent.pid, parent.is_alive(), os.getppid(), os.getpgrp() == os.getpid(), sys.stdin.read()

    name, parent, alive, ppid, leads_group, stdin = mpwatch.run(describe, 1)[0]
    assert name == "mpwatch-rank-0"
    assert parent == ppid == os.getpid()
    assert alive
    assert leads_group
    assert stdin == ""


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
        mpwatch.run(use, 3, args=(theirs, queue, lock, event, value))
        assert mine.recv() == "through a connection"
    assert queue.get() == "through a queue"
    assert value.value == 3
    queue.close()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_rank_can_start_processes_by_any_method(method):
    def start(method):
        default = multiprocessing.get_start_method(allow_none=True)  # spawn and forkserver fix it when they are used
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=queue.put, args=(5,))
        child.start()
        child.join()
        return queue.get(), child.exitcode, default

    assert mpwatch.run(start, 1, args=(method,))[0] == (5, 0, None)


def test_a_run_inside_a_rank():
    def outer():
        return list(mpwatch.run(functions.rank, 2)), functions.rank()

    assert list(mpwatch.run(outer, 2)) == [([0, 1], 0), ([0, 1], 1)]


def test_several_runs_at_the_same_time_and_off_the_main_thread():
    def port():
        return os.environ["MASTER_PORT"]

    with ThreadPoolExecutor(3) as pool:
        ports = [set(result) for result in pool.map(lambda _: mpwatch.run(port, 2), range(3))]
    assert len(set.union(*ports)) == 3


def test_under_asyncio():
    async def program():
        return await asyncio.to_thread(mpwatch.run, functions.rank, 2)

    assert list(asyncio.run(program())) == [0, 1]


def test_a_run_in_a_thread_that_has_ended():
    results = []
    thread = threading.Thread(target=lambda: results.append(mpwatch.run(functions.rank, 2)))
    thread.start()
    thread.join()
    assert list(results[0]) == [0, 1]


@pytest.mark.parametrize("saboteur", [functions.exits_with_0, functions.exits_with_none])
def test_sys_exit_0_is_a_success_without_a_value(saboteur):
    assert list(mpwatch.run(saboteur, 2)) == [None, None]


def test_ranks_run_exit_hooks_and_wait_for_threads(tmp_path):
    def register_hooks(path):
        import atexit

        thread = threading.Thread(
            target=lambda: threading.main_thread().join() or (path / f"thread-{functions.rank()}").touch()
        )
        thread.start()
        atexit.register((path / f"atexit-{functions.rank()}").touch)

    mpwatch.run(register_hooks, 2, args=(tmp_path,))
    assert {path.name for path in tmp_path.iterdir()} == {"thread-0", "thread-1", "atexit-0", "atexit-1"}


def test_a_rank_that_does_not_exit_is_named(caplog):
    result = mpwatch.run(functions.leaves_a_thread, 2, grace_period=0.2)
    assert list(result) == [0, 1]
    assert "rank 0 had returned but was still running 1 s later (non-daemon threads: endless prefetcher)" in caplog.text


def test_a_forked_child_of_a_rank_sends_no_value():
    result = mpwatch.run(functions.forks_and_both_return, 2)
    assert list(result) == [False, False]


def test_arguments_and_results_of_a_hundred_megabytes():
    data = os.urandom(1 << 20) * 100
    lengths = mpwatch.run(lambda blob: (len(blob), blob[:7], blob * 1), 2, args=(data,))
    for length, start, back in lengths:
        assert length == len(data)
        assert start == data[:7]
        assert back == data


@pytest.mark.slow
def test_a_hundred_ranks():
    assert list(mpwatch.run(functions.rank, 100)) == list(range(100))


def test_limits_of_any_length():
    assert list(mpwatch.run(functions.rank, 2, timeout=3e9, grace_period=1e9)) == [0, 1]


def test_exit_hooks_run_after_a_success_without_a_grace_period(caplog, tmp_path):
    def register_hook(path):
        import atexit

        atexit.register((path / str(functions.rank())).touch)

    mpwatch.run(register_hook, 2, args=(tmp_path,), grace_period=0)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert caplog.text == ""


def test_the_timeout_is_for_the_whole_run_start_included():
    def slow(worker):
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
        return {}

    with pytest.raises(mpwatch.RunTimeoutError):
        mpwatch.run(functions.rank, 1, timeout=0.2, env=slow)


def test_other_threads_may_join_the_ranks(barrier):
    """Multiprocessing does so at the end of the program. The join must not keep the watcher from stopping the ranks."""
    joined = []

    def join():
        while not (ranks := [p for p in multiprocessing.active_children() if p.name.startswith("mpwatch-rank")]):
            os.sched_yield()
        for process in ranks:
            process.join()
        joined.append(len(ranks))

    thread = threading.Thread(target=join)
    thread.start()
    with pytest.raises(mpwatch.RunFailedError, match="rank 1 failed first"):
        mpwatch.run(failing.call_on_rank_1, 3, args=(failing.raises_value_error, barrier))
    thread.join()
    assert joined


def test_a_return_value_does_not_change_the_caller_s_classes():
    class Config:
        total = 1

        def bump(self):
            return Config.total

    def change():
        Config.total = 99
        return Config()

    bump = Config.bump
    (back,) = mpwatch.run(change, 1)
    assert type(back) is Config
    assert (Config.total, Config.bump, back.bump()) == (1, bump, 1)


class AttributeDict(dict):
    __getattr__ = dict.get


def test_values_that_have_every_attribute():
    assert mpwatch.run(lambda: AttributeDict(a=1), 1)[0] == {"a": 1}


def test_more_descriptors_than_one_message_takes():
    pipes = [os.pipe() for _ in range(150)]
    connections = [multiprocessing.connection.Connection(fd) for pipe in pipes for fd in pipe]
    readers, writers = connections[::2], connections[1::2]
    mpwatch.run(lambda writers: [writer.send_bytes(b"x") for writer in writers] and None, 1, args=(writers,))
    assert all(reader.recv_bytes() == b"x" for reader in readers)
    for connection in connections:
        connection.close()


def test_a_port_from_env_is_the_worker_s_master_port():
    def port():
        return os.environ["MASTER_PORT"], mpwatch.current_worker().master_port

    assert mpwatch.run(port, 1, env={"MASTER_PORT": "29999"})[0] == ("29999", 29999)


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


def test_a_torch_free_run_never_imports_torch_nor_cloudpickle():
    code = (
        "import sys, mpwatch\n"
        "from support import functions\n"
        "result = mpwatch.run(functions.rank, 1)\n"
        "assert not {'torch', 'cloudpickle', 'numpy'} & set(sys.modules)\n"
        "print(mpwatch.run(functions.list_modules, 1)[0])\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    modules = set(eval(out.stdout))
    assert not modules & {
        "torch",
        "cloudpickle",
        "tblib",
        "dataclasses",
        "tempfile",
        "mpwatch.watcher",
        "mpwatch.options.spec",
    }


def test_ranks_start_with_unblocked_signals():
    def read_mask():
        return signal.pthread_sigmask(signal.SIG_BLOCK, ())

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        assert mpwatch.run(read_mask, 1)[0] == set()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask | {signal.SIGTERM, signal.SIGUSR1}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
