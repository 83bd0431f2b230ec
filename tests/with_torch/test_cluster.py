"""Jobs of several nodes from one call: `mpwatch.cluster`, with nodes that are threads or processes of this machine."""

import io
import math
import pickle
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import partial

import cloudpickle
import pytest
import torch

import mpwatch
from mpwatch import cluster, events
from support import functions
from support.programs import ENV


@pytest.fixture(scope="module", autouse=True)
def _warm_up():
    """Create a store first: libuv, which torch's store uses, keeps a pipe from its first use on."""
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run(fn, nprocs=1, *, engine=None, nodes=2, **options):
    return cluster.run(engine or cluster.ThreadEngine(), fn, nprocs, nodes=nodes, **options)


class PlannedEngine(cluster.ThreadEngine):
    """`plan(start, number)` returns the future of a node: that of `start()`, or another one."""

    def __init__(self, plan=lambda start, number: start()):
        super().__init__()
        self.plan, self.planned = plan, {}

    def start(self, call, number):
        self.planned[number] = self.plan(partial(super().start, call, number), number)
        return self.planned[number]

    def cancel(self, number):
        self.planned[number].cancel()


def make_engine_that_loses(count):
    """Make an engine that loses the first `count` nodes before they have connected."""

    def plan(start, number):
        if number >= count:
            return start()
        lost = Future()
        lost.set_exception(ConnectionError("the machine is gone"))
        return lost

    return PlannedEngine(plan)


def make_engine_with_room_for(count):
    return PlannedEngine(lambda start, number: start() if number < count else Future())


# ---- A job is as a run on one machine


def test_the_result_has_the_values_of_all_ranks():
    def add_up(factor):
        import numpy as np
        import torch

        rank = mpwatch.current_worker().rank
        total = torch.tensor(float(rank))
        torch.distributed.all_reduce(total)
        return factor * float(total), np.full(100_000, rank)

    seen = []
    result = run(add_up, args=(10,), backend="gloo", on_event=seen.append, grace_period=60)
    assert [(value, int(array[-1])) for value, array in result] == [(10.0, rank) for rank in range(2)]
    assert [worker.rank for worker in result.workers] == [0, 1]
    assert {rank for event in seen for rank in event.ranks} == {0, 1}
    assert len(result.events) == len(seen)


def test_a_failure_is_that_of_the_rank_and_its_output_is_shown(capsys):
    class RankError(Exception):
        pass

    def print_and_fail():
        worker = mpwatch.current_worker()
        print(f"rank {worker.rank}", flush=True)
        if worker.rank == 1:
            raise RankError("the disk is full")
        signal.pause()

    text = "rank 1 on node .* failed first: .*RankError: the disk is full"
    with pytest.raises(mpwatch.RunFailedError, match=text) as caught:
        run(print_and_fail)
    assert type(caught.value.__cause__) is RankError
    assert caught.value.__cause__.__traceback__.tb_frame.f_code.co_name == "print_and_fail"
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.partition("] ")[2] for line in lines if "rank 1" in line) == ["rank 1"]
    assert all(line.startswith(("[0:0] ", "[1:1] ")) for line in lines)


def test_a_timeout_names_the_ranks_of_all_nodes():
    text = r"timeout=1 s: rank \d had not returned; on other nodes rank \d had not"
    with pytest.raises(mpwatch.RunTimeoutError, match=text):
        run(signal.pause, timeout=1)


def test_view_progress_and_output_come_from_all_nodes(capfd):
    def report_and_print():
        for step in range(5):
            mpwatch.report(step=step + 1, total=5)
        print("done", flush=True)

    out, reports, kinds = io.StringIO(), [], set()
    logs = mpwatch.LogSpec(stdout=out, prefix="{rank}> ")
    observers = {"on_progress": reports.append, "on_event": lambda event: kinds.add(type(event))}
    run(report_and_print, 2, progress=True, logs=logs, **observers)
    assert "step 5 of 5 (100 %); 4 ranks returned" in capfd.readouterr().err
    assert sorted(out.getvalue().splitlines()) == [f"{rank}> done" for rank in range(4)]
    assert {report.ranks for report in reports if report.step == 5} == {(rank,) for rank in range(4)}
    assert events.RunEnded in kinds
    assert events.Progressed not in kinds  # they go to on_progress alone


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"debug": "post_mortem"}, ValueError, "debug='post_mortem': the nodes have no terminal"),
        ({"nodes": 0}, ValueError, "^nodes must be"),
        ({"rendezvous": "10.0.0.1:1"}, TypeError, "a job on a cluster has no option 'rendezvous'"),
        ({"queue_timeout": 0}, ValueError, "queue_timeout must be a number of seconds, more than 0, not 0"),
        ({"engine": "ray"}, TypeError, r"engine must be an object such as mpwatch\.cluster\.ThreadEngine\(\), not "),
        ({"args": (threading.Lock(),)}, mpwatch.LaunchError, r"args\[0\] is a _thread.lock, which cannot be sent"),
    ],
)
def test_a_bad_option_is_named(options, error, text):
    with pytest.raises(error, match=text):
        run(print, **{"nodes": 1, **options})


# ---- Nodes that are lost


def test_a_node_that_is_lost_before_it_connects_is_replaced():
    assert list(run(functions.rank, engine=make_engine_that_loses(1))) == [0, 1]


def test_an_engine_that_can_start_no_node_is_an_error_with_its_reason():
    with pytest.raises(mpwatch.LaunchError, match=r"^the engine could not start node 2: the machine is gone$"):
        run(functions.rank, engine=make_engine_that_loses(math.inf), nodes=1)


def test_a_node_that_the_engine_has_lost_does_not_go_on():
    """The engine loses node 0 when its ranks are called, although the node is alive."""
    gone = Future()

    def plan(start, number):
        future = start()
        return future if number else gone

    def lose_node(event):
        if isinstance(event, events.CallStarted) and not gone.done():
            gone.set_exception(ConnectionError("its machine does not answer"))

    options = {"engine": PlannedEngine(plan), "nodes": 1, "args": (1,), "max_restarts": 1, "on_event": lose_node}
    assert list(run(functions.wait_unless_restarted, **options)) == [(0, 1)]


NODE = """
import os, pickle, sys
out = os.dup(1)
os.dup2(2, 1)
PREPARE
outcome = pickle.load(sys.stdin.buffer)()
with open(out, "wb") as stream:
    pickle.dump((outcome.data, [bytes(buffer) for buffer in outcome.buffers]), stream)
"""


class ProcessEngine(cluster.ThreadEngine):
    """Starts nodes that are processes, and can kill them. `prepare` is Python code that each node runs first."""

    def __init__(self, prepare=""):
        super().__init__()
        self.command = [sys.executable, "-c", NODE.replace("PREPARE", prepare)]
        self.processes = []

    def start(self, call, number):
        return super().start(partial(self.execute, cloudpickle.dumps(call)), number)

    def execute(self, call):
        with subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV) as process:
            self.processes.append(process)
            answer, _ = process.communicate(call)
        if process.returncode:
            raise ConnectionError("its process was killed")
        return cluster.NodeOutcome(*pickle.loads(answer))


def test_a_job_whose_nodes_are_all_lost_is_restarted_by_new_nodes(caplog):
    engine, seen, called = ProcessEngine(), [], []

    def kill_both_nodes(event):
        seen.append(event)
        if isinstance(event, events.CallStarted):
            called.append(event)
            if len(called) == 2:
                for process in engine.processes:
                    process.kill()

    options = {"args": (1,), "max_restarts": 2, "node_timeout": 2.0, "on_event": kill_both_nodes}
    result = run(functions.wait_unless_restarted, engine=engine, nodes=2, **options)
    assert list(result) == [(rank, 1) for rank in range(2)]
    first, second = result.attempts
    assert (first.root_cause.kind, second.is_counted, result.restarts) == (mpwatch.FailureKind.LOST, True, 1)
    assert [event.restarts_left for event in seen if isinstance(event, events.Restarting)] == [1]
    assert re.search(r"\(restart 1, 1 left\): node \d \(.*\) with rank", caplog.text)


def test_a_job_whose_nodes_are_lost_again_ends_when_its_restarts_are_used_up():
    engine = ProcessEngine()

    def kill(event):
        if isinstance(event, events.CallStarted):
            engine.processes[-1].kill()

    result = run(signal.pause, engine=engine, nodes=1, max_restarts=1, on_event=kill, check=False)
    assert result.root_cause.kind is mpwatch.FailureKind.LOST
    assert [attempt.is_counted for attempt in result.attempts] == [False, True]
    assert result.notes == ("not restarted again: all restarts are used up (max_restarts=1)",)


# ---- Nodes that cannot run the function


def test_a_function_that_a_node_cannot_load_is_an_error_that_names_the_node(tmp_path, monkeypatch):
    (tmp_path / "module_of_the_driver.py").write_text("def train(): pass")
    monkeypatch.syspath_prepend(tmp_path)
    import module_of_the_driver

    text = r"node 0 \(.+\) cannot load the function and its arguments: ModuleNotFoundError: No module named 'module_of_the"
    with pytest.raises(mpwatch.LaunchError, match=text):
        run(module_of_the_driver.train, engine=ProcessEngine(), nodes=1)


def test_another_version_of_mpwatch_is_an_error():
    engine = ProcessEngine(prepare="import mpwatch; mpwatch.__version__ = '0.0.1'")
    text = r"node 0 \(.+\) has mpwatch 0\.0\.1, but the driver has .+; install the same"
    with pytest.raises(mpwatch.LaunchError, match=text):
        run(functions.rank, engine=engine, nodes=1)


# ---- Nodes that come late, or not at all


def test_a_job_begins_without_nodes_that_do_not_come():
    assert list(run(functions.rank, engine=make_engine_with_room_for(2), nodes=(1, 3), last_call_timeout=1.0)) == [0, 1]


def test_a_cluster_that_begins_no_node_is_an_error():
    text = r"^no node of the job has connected to this program\. The job has waited for 0\.5 s \(queue_timeout\)$"
    with pytest.raises(mpwatch.LaunchError, match=text):
        run(functions.rank, engine=make_engine_with_room_for(0), nodes=1, queue_timeout=0.5)


class CrowdedEngine(cluster.ThreadEngine):
    """Has no room until it was asked this number of times, and starts no node before."""

    def __init__(self, questions):
        super().__init__()
        self.questions = questions

    def describe_wait(self):
        self.questions -= 1
        return "" if self.questions < 0 else "2 other jobs have the machines"

    def start(self, call, number):
        assert self.questions < 0
        return super().start(call, number)


@pytest.mark.parametrize("questions", [1, pytest.param(22, marks=pytest.mark.slow)])
def test_nodes_are_started_when_the_cluster_has_room(questions, caplog):
    """It asks twice a second, and warns after ten seconds."""
    assert list(run(functions.rank, engine=CrowdedEngine(questions), queue_timeout=60)) == [0, 1]
    text = "2 other jobs have the machines. The job has waited for 10 s, and waits for up to 60 s (queue_timeout)"
    assert caplog.messages == ([text] if questions > 20 else [])
