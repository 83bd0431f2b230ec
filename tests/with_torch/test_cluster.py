"""Jobs of several nodes from one call: `mpwatch.cluster`, with nodes that are threads of this process."""

import io
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Client, Listener

import cloudpickle
import numpy as np
import pytest
import torch

import mpwatch
from mpwatch import cluster
from mpwatch.cluster import driver, queue_wait
from mpwatch.cluster.links import NodeLinks
from support import functions
from support.programs import ENV


@pytest.fixture(scope="module", autouse=True)
def _warm_up():
    """Create a store first: libuv, which torch's store uses, keeps a pipe from its first use on."""
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class RankError(Exception):
    """Raised by a rank."""


def add_up(factor):
    worker = mpwatch.current_worker()
    total = torch.tensor(float(worker.rank))
    torch.distributed.all_reduce(total)
    return factor * float(total), np.full(100_000, worker.rank)


def print_and_fail():
    worker = mpwatch.current_worker()
    print(f"rank {worker.rank}", flush=True)
    if worker.rank == 1:
        raise RankError("the disk is full")
    signal.pause()


def wait_for_stop():
    step = 0
    while not mpwatch.should_stop(step):
        step += 1
    return step


def test_the_result_has_the_values_of_all_ranks():
    events = []
    result = cluster.run(
        cluster.ThreadEngine(), add_up, 2, nodes=2, args=(10,), backend="gloo", on_event=events.append, grace_period=60
    )
    assert [value for value, _ in result] == [60.0] * 4
    assert [int(array[0]) for _, array in result] == [0, 1, 2, 3]
    assert [worker.rank for worker in result.workers] == [0, 1, 2, 3]
    assert {rank for event in events for rank in event.ranks} == {0, 1, 2, 3}
    assert len(result.events) == len(events)


def test_a_failure_is_that_of_the_rank_and_its_output_is_shown(capsys):
    with pytest.raises(
        mpwatch.RunFailedError, match=r"rank 1 on node .* failed first: RankError: the disk is full"
    ) as caught:
        cluster.run(cluster.ThreadEngine(), print_and_fail, 1, nodes=2)
    assert type(caught.value.__cause__) is RankError
    assert caught.value.__cause__.__traceback__.tb_frame.f_code.co_name == "print_and_fail"
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.partition("] ")[2] for line in lines if "rank 1" in line) == ["rank 1"]
    assert all(line.startswith(("[0:0] ", "[1:1] ")) for line in lines)


def test_ctrl_c_stops_all_nodes():
    def interrupt(event):
        if isinstance(event, mpwatch.events.CallStarted):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        cluster.run(cluster.ThreadEngine(), signal.pause, 1, nodes=2, on_event=interrupt)


def test_nodes_end_by_themselves_if_a_third_ctrl_c_interrupts_the_wait_for_them(monkeypatch):
    calls = []

    def interrupt(event=None):
        calls.extend([event] if isinstance(event, mpwatch.events.CallStarted) else [])
        if calls:
            raise KeyboardInterrupt

    engine = cluster.ThreadEngine()
    close = engine.close
    monkeypatch.setattr(engine, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(engine, signal.pause, 1, nodes=2, on_event=interrupt)
    close()
    assert all(future.done() for future in engine._futures.values())


def test_all_nodes_stop_at_the_same_step():
    result = cluster.run(cluster.ThreadEngine(), wait_for_stop, 1, nodes=2, stop=mpwatch.StopPolicy(after=2.0))
    assert list(result) == [result.stopped_at] * 2


def test_a_timeout_names_the_ranks_of_all_nodes():
    text = (
        r"node \d \(.*\): the run did not end within timeout=1 s: rank \d had not returned; on other nodes rank \d had not"
    )
    with pytest.raises(mpwatch.RunTimeoutError, match=text):
        cluster.run(cluster.ThreadEngine(), signal.pause, 1, nodes=2, timeout=1)


def test_a_stop_before_the_ranks_are_started_is_named():
    with pytest.raises(
        mpwatch.RunFailedError, match="the run was stopped: a stop was requested, before its ranks were started"
    ):
        cluster.run(cluster.ThreadEngine(), functions.rank, 1, nodes=2, stop=mpwatch.StopPolicy(after=0.001))


class LosingEngine(cluster.ThreadEngine):
    """Loses the first node before it has connected."""

    def start(self, call, number):
        if number == 0:
            lost = Future()
            lost.set_exception(ConnectionError("the machine is gone"))
            return lost
        return super().start(call, number)


def test_a_lost_node_is_replaced():
    result = cluster.run(LosingEngine(), functions.rank, 1, nodes=2)
    assert list(result) == [0, 1]


class BlindEngine(cluster.ThreadEngine):
    """Does not notice that the first node dies after it has connected."""

    def start(self, call, number):
        if number > 0:
            return super().start(call, number)
        (spec,) = call.args
        with Client(spec.driver, authkey=spec.key) as connection:
            connection.send(("hello", (0, "here")))
        self._futures[0] = Future()
        return self._futures[0]


def test_a_node_whose_link_breaks_is_replaced():
    result = cluster.run(BlindEngine(), functions.rank, 1, nodes=2)
    assert list(result) == [0, 1]


def test_the_connection_of_a_lost_node_is_closed_at_once(monkeypatch):
    released, seen = [], []
    release = NodeLinks.release

    def note_release(self, connection):
        release(self, connection)
        released.append(connection.closed)

    def look(event):
        if isinstance(event, mpwatch.events.CallStarted):
            seen.append(list(released))

    monkeypatch.setattr(NodeLinks, "release", note_release)
    cluster.run(BlindEngine(), functions.rank, 1, nodes=2, on_event=look)
    assert seen[0] == [True]


class UnreadableEngine(BlindEngine):
    """Has a node that sends what the driver cannot unpickle."""

    def start(self, call, number):
        if number > 0:
            return super().start(call, number)
        (spec,) = call.args
        connection = Client(spec.driver, authkey=spec.key)
        connection.send(("hello", (0, "here")))
        connection.send_bytes(b"cmodule_of_the_node\nStatus\n.")
        self._futures[0] = Future()
        self._futures[0].add_done_callback(lambda _: connection.close())
        return self._futures[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_node_that_the_driver_cannot_understand_is_replaced():
    result = cluster.run(UnreadableEngine(), functions.rank, 1, nodes=2)
    assert list(result) == [0, 1]


class BrokenEngine(cluster.ThreadEngine):
    """Can start no node.

    Args:
        text: of the error.
    """

    def __init__(self, text):
        super().__init__()
        self.text = text

    def start(self, call, number):
        lost = Future()
        lost.set_exception(ConnectionError(self.text))
        return lost


def test_an_engine_that_can_start_no_node_is_an_error():
    with pytest.raises(mpwatch.LaunchError, match=r"the engine could not start node 2: there is no such package$"):
        cluster.run(BrokenEngine("there is no such package"), functions.rank, 1, nodes=1)


def test_the_reason_at_the_end_of_a_traceback_is_in_the_error_of_an_engine():
    text = (
        "Failed to set up runtime environment.\nTraceback (most recent call last):\n"  # as Ray's RuntimeEnvSetupError
        '  File "pip.py", line 12, in install\n    raise CommandError(\n    ^^^^^\n'
        "CommandError: pip failed.\n    Looking in indexes\n    ERROR: No matching distribution found\n"
    )
    with pytest.raises(mpwatch.LaunchError) as caught:
        cluster.run(BrokenEngine(text), functions.rank, 1, nodes=1)
    assert str(caught.value).splitlines() == [
        "the engine could not start node 2: Failed to set up runtime environment.",
        "CommandError: pip failed.",
        "    Looking in indexes",
        "    ERROR: No matching distribution found",
    ]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"debug": "post_mortem"}, ValueError, "debug='post_mortem': the nodes have no terminal"),
        ({"grace_period": -1}, ValueError, "grace_period must be a number of seconds"),
        ({"nodes": 0}, ValueError, "^nodes must be"),
        ({"queue_timeout": 0}, ValueError, "queue_timeout must be a number of seconds, more than 0, not 0"),
        ({"epochs": 3}, TypeError, "epochs"),
    ],
)
def test_a_bad_option_is_named(options, error, text):
    with pytest.raises(error, match=text):
        cluster.run(cluster.ThreadEngine(), functions.rank, 1, **{"nodes": 1, **options})


def report_and_print(steps):
    for step in range(steps):
        mpwatch.report(step=step + 1, total=steps)
    print("done", flush=True)


@pytest.mark.slow
def test_the_view_shows_the_ranks_of_all_nodes(capfd):
    cluster.run(cluster.ThreadEngine(), report_and_print, 2, nodes=2, args=(5,), progress=True)
    assert "step 5 of 5 (100 %); 4 ranks returned" in capfd.readouterr().err


def test_an_observer_that_raises_is_dropped_and_the_others_go_on(caplog):
    kinds = []

    def fail(event):
        raise ValueError(event.name)

    result = cluster.run(
        cluster.ThreadEngine(), functions.rank, 1, nodes=2, on_event=[fail, lambda event: kinds.append(type(event))]
    )
    assert list(result) == [0, 1]
    assert kinds.count(mpwatch.events.RunEnded) == 2
    assert sum("receives no more events" in record.getMessage() for record in caplog.records) == 1


def test_only_on_progress_receives_progress():
    reports, kinds = [], set()
    options = {"on_progress": reports.append, "on_event": lambda event: kinds.add(type(event))}
    cluster.run(cluster.ThreadEngine(), report_and_print, 1, nodes=1, args=(1,), **options)
    assert [report.step for report in reports] == [1]
    assert mpwatch.events.RunEnded in kinds
    assert mpwatch.events.Progressed not in kinds


@pytest.mark.slow
def test_output_goes_to_the_streams_of_the_log_spec():
    out = io.StringIO()
    logs = mpwatch.LogSpec(stdout=out, prefix="{rank}> ")
    cluster.run(cluster.ThreadEngine(), report_and_print, 1, nodes=2, args=(1,), logs=logs)
    assert sorted(out.getvalue().splitlines()) == ["0> done", "1> done"]


class FlakyEngine(cluster.ThreadEngine):
    """Loses node 0 when its call is over, as if its process had been killed. It has no node for a third call."""

    def start(self, call, number):
        if number > 1:
            self._futures[number] = Future()
            return self._futures[number]
        future = super().start(call, number)
        if number > 0:
            return future
        lost = Future()
        future.add_done_callback(lambda _: lost.set_exception(ConnectionError("the machine is gone\nmore")))
        return lost


def test_a_job_whose_only_node_is_lost_at_its_end_fails():
    with pytest.raises(
        mpwatch.RunFailedError, match=r"node 0 \(.*\) with ranks 0-1 was lost: the machine is gone\n"
    ) as caught:
        cluster.run(FlakyEngine(), functions.rank, 2, nodes=1, max_restarts=3)
    assert {failure.kind for failure in caught.value.result.failures.values()} == {mpwatch.FailureKind.LOST}
    assert "not restarted: the ranks had ended before that" in str(caught.value)


def test_a_job_whose_node_is_lost_at_the_end_has_not_succeeded():
    with pytest.raises(
        mpwatch.RunFailedError, match=r"node \d \(.*\) with rank \d was lost: the machine is gone\n"
    ) as caught:
        cluster.run(FlakyEngine(), functions.rank, 1, nodes=2)
    result = caught.value.result
    assert len(result.return_values) == len(result.failures) == 1
    assert sorted(result.return_values | result.failures) == [0, 1]


NODE = """
import os, pickle, sys
out = os.dup(1)
os.dup2(2, 1)
outcome = pickle.load(sys.stdin.buffer)()
with open(out, "wb") as stream:
    pickle.dump((outcome.data, [bytes(buffer) for buffer in outcome.buffers]), stream)
"""


class ProcessEngine(cluster.ThreadEngine):
    """Starts nodes that are processes, and kills them.

    Args:
        limit: how many nodes it can start.
        error: of further nodes. None: they wait.
    """

    def __init__(self, limit=math.inf, error=None):
        super().__init__()
        self.limit = limit
        self.error = error
        self.processes = []

    def start(self, call, number):
        if number < self.limit:
            return super().start(partial(self.execute, cloudpickle.dumps(call)), number)
        self._futures[number] = Future()
        if self.error is not None:
            self._futures[number].set_exception(self.error)
        return self._futures[number]

    def execute(self, call):
        with subprocess.Popen(
            [sys.executable, "-c", NODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV
        ) as process:
            self.processes.append(process)
            answer, _ = process.communicate(call)
        if process.returncode:
            raise ConnectionError("its process was killed")
        data, buffers = pickle.loads(answer)
        return cluster.NodeOutcome(data, buffers)


class KillAllNodes:
    """Kills all nodes as often as wanted, each time when the ranks of all nodes have been called."""

    def __init__(self, engine, nodes, times=1):
        self.engine, self.nodes, self.times = engine, nodes, times
        self.events, self.calls = [], 0

    def __call__(self, event):
        self.events.append(event)
        self.calls += isinstance(event, mpwatch.events.CallStarted)
        if self.times and self.calls == self.nodes:
            self.calls = 0
            self.times -= 1
            for process in self.engine.processes:
                process.kill()


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_a_job_whose_nodes_are_all_lost_is_restarted_by_new_nodes(nodes, caplog):
    engine = ProcessEngine()
    kill = KillAllNodes(engine, nodes if isinstance(nodes, int) else 2)
    result = cluster.run(
        engine, functions.wait_unless_restarted, 2, nodes=nodes, args=(1,), max_restarts=2, node_timeout=2.0, on_event=kill
    )
    assert list(result) == [(rank, 1) for rank in range(len(result))]
    assert result.restarts == 1
    first, second = result.attempts
    assert first.root_cause.kind is mpwatch.FailureKind.LOST
    assert second.is_counted
    (restarting,) = [event for event in kill.events if isinstance(event, mpwatch.events.Restarting)]
    assert restarting.restarts_left == 1
    assert re.search(r"\(restart 1, 1 left\): node \d \(.*\) with rank", caplog.text)


@pytest.mark.slow
def test_a_job_whose_nodes_are_all_lost_again_and_again_fails():
    engine = ProcessEngine()
    kill = KillAllNodes(engine, 1, times=3)
    with pytest.raises(
        mpwatch.RunFailedError, match=r"node 0 \(.*\) with rank 0 was lost: its process was killed\n"
    ) as caught:
        cluster.run(
            engine, functions.wait_unless_restarted, 1, nodes=1, args=(9,), max_restarts=2, node_timeout=2.0, on_event=kill
        )
    assert "not restarted again: all restarts are used up (max_restarts=2)" in str(caught.value)
    assert [str(attempt).partition(",")[0] for attempt in caught.value.result.attempts] == [
        "first start",
        "restart 1",
        "restart 2",
    ]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError("no machine is left"),
            "the new nodes could not begin: the engine could not start node 3: no machine is left",
        ),
        pytest.param(None, "no new node has begun within 10 s (queue_timeout)", marks=pytest.mark.slow),
    ],
)
def test_a_job_whose_nodes_are_all_lost_fails_without_new_nodes(error, text):
    engine = ProcessEngine(limit=1, error=error)
    kill = KillAllNodes(engine, 1)
    with pytest.raises(
        mpwatch.RunFailedError, match=r"node 0 \(.*\) with rank 0 was lost: its process was killed\n"
    ) as caught:
        cluster.run(engine, signal.pause, 1, nodes=1, max_restarts=2, queue_timeout=10.0, on_event=kill)
    assert f"not restarted: {text}" in str(caught.value)


class SlowEngine(cluster.ThreadEngine):
    """Brings the outcome of node 0 when the test wants it."""

    def start(self, call, number):
        future = super().start(call, number)
        if number > 0:
            return future
        self.ended, self.slow = future, Future()
        return self.slow


def test_the_driver_waits_for_a_result_that_takes_long_to_come(monkeypatch):
    engine = SlowEngine()
    handle_deadline = driver.Driver._handle_deadline

    def bring_outcome_at_last(self):
        handle_deadline(self)
        if self._is_given_up or self._deadline == math.inf:
            engine.slow.set_result(engine.ended.result())

    monkeypatch.setattr(driver, "END_SECONDS", 0.0)
    monkeypatch.setattr(driver.Driver, "_handle_deadline", bring_outcome_at_last)
    result = cluster.run(engine, functions.rank, 1, nodes=2, grace_period=0.1)
    assert list(result) == [0, 1]


class InterruptingValue:
    """Is interrupted with Ctrl-C when the driver unpickles it."""

    def __reduce__(self):
        return _make_interrupting_value, ()


def _make_interrupting_value():
    if threading.current_thread() is threading.main_thread():  # nodes are other threads
        signal.raise_signal(signal.SIGINT)
    return InterruptingValue()


def return_interrupting_value():
    return InterruptingValue() if mpwatch.current_worker().rank == 0 else None


@pytest.mark.slow
def test_ctrl_c_while_the_outcome_of_a_node_is_read(monkeypatch):
    monkeypatch.setattr(driver, "END_SECONDS", 600.0)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(cluster.ThreadEngine(), return_interrupting_value, 1, nodes=2)


class ChangingEngine(cluster.ThreadEngine):
    """Changes what the nodes get.

    Args:
        changes: the fields of their NodeSpec.
    """

    def __init__(self, **changes):
        super().__init__()
        self.changes = changes

    def start(self, call, number):
        (spec,) = call.args
        return super().start(partial(call.func, replace(spec, **self.changes)), number)


def test_a_function_that_a_node_cannot_load_is_an_error_that_names_the_node():
    call = b"cmodule_of_the_driver\ntrain\n."
    text = r"node 0 \(.+\) cannot load the function and its arguments: ModuleNotFoundError: No module named 'module_of_the"
    with pytest.raises(mpwatch.LaunchError, match=text):
        cluster.run(ChangingEngine(call=call), functions.rank, 1, nodes=1)


def test_another_version_of_mpwatch_is_an_error():
    with pytest.raises(
        mpwatch.LaunchError, match=r"node 0 \(.+\) has mpwatch .+, but the driver has 0\.0\.1; install the same"
    ):
        cluster.run(ChangingEngine(version="0.0.1"), functions.rank, 1, nodes=1)


def test_a_node_that_cannot_connect_to_the_driver_says_so():
    with Listener(("127.0.0.1", 0)) as listener:
        address = listener.address
    text = f"the engine could not start node 2: .* cannot connect to the driver at 127.0.0.1:{address[1]}: .*refused"
    with pytest.raises(mpwatch.LaunchError, match=text):
        cluster.run(ChangingEngine(driver=address), functions.rank, 1, nodes=1)


def test_an_address_that_is_not_of_this_machine_is_an_error():
    engine = cluster.ThreadEngine()
    engine.address = "192.0.2.1"  # reserved for documentation
    with pytest.raises(mpwatch.LaunchError, match=r"the driver cannot listen at 192\.0\.2\.1, which must be an address of"):
        cluster.run(engine, functions.rank, 1, nodes=1)


class LateEngine(cluster.ThreadEngine):
    """Starts node 1 when node 0 has ended, so that it comes too late for the job."""

    def start(self, call, number):
        if number == 0:
            self.first = super().start(call, number)
            return self.first
        late = Future()
        self.first.add_done_callback(
            lambda _: (
                super(LateEngine, self)
                .start(call, number)
                .add_done_callback(
                    lambda done: (
                        late.set_result(done.result()) if done.exception() is None else late.set_exception(done.exception())
                    )
                )
            )
        )
        return late


def test_a_node_that_comes_too_late_does_not_keep_the_job_waiting(caplog):
    caplog.set_level("INFO", "mpwatch")
    result = cluster.run(LateEngine(), functions.rank, 1, nodes=(1, 2), last_call_timeout=0.0)
    assert list(result) == [0]
    assert "waiting" not in caplog.text


class SmallEngine(cluster.ThreadEngine):
    """Has room for two nodes."""

    def start(self, call, number):
        if number < 2:
            return super().start(call, number)
        self._futures[number] = waiting = Future()
        return waiting

    def lacks_room(self, number):
        return number >= 2


def test_nodes_do_not_wait_for_more_if_the_cluster_has_no_room(caplog):
    caplog.set_level("INFO", "mpwatch")
    result = cluster.run(SmallEngine(), functions.rank, 1, nodes=(1, 3), join_timeout=20.0)
    assert list(result) == [0, 1]
    assert "of at most 3 nodes have come; waiting up to 30 s for more (last_call_timeout)" in caplog.text
    assert "the cluster has no room for more nodes now; the job begins with 2 of at most 3" in caplog.text


def test_nodes_wait_for_more_if_the_user_wants_it(caplog):
    caplog.set_level("INFO", "mpwatch")
    result = cluster.run(SmallEngine(), functions.rank, 1, nodes=(1, 3), last_call_timeout=1.0)
    assert list(result) == [0, 1]
    assert "the cluster has no room" not in caplog.text


class FullEngine(cluster.ThreadEngine):
    """Has no room for any node."""

    def start(self, call, number):
        self._futures[number] = Future()
        return self._futures[number]


def test_a_cluster_that_begins_no_node_is_an_error():
    text = r"^no node of the job has connected to this program\. The job has waited for 0\.5 s \(queue_timeout\)$"
    with pytest.raises(mpwatch.LaunchError, match=text):
        cluster.run(FullEngine(), functions.rank, 1, nodes=1, queue_timeout=0.5)


def test_a_job_waits_in_the_queue_without_limit_and_ctrl_c_cancels_it(monkeypatch, caplog):
    engine = FullEngine()
    monkeypatch.setattr(queue_wait, "FIRST_REPORT_SECONDS", 0.1)
    take_report = queue_wait.QueueWait.take_report

    def interrupt_after_report(self, what, now):
        if not caplog.messages:
            return take_report(self, what, now)
        raise KeyboardInterrupt

    monkeypatch.setattr(queue_wait.QueueWait, "take_report", interrupt_after_report)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(engine, functions.rank, 1, nodes=2, join_timeout=0.05)
    (warning,) = caplog.messages
    assert re.fullmatch(
        r"no node of the job has connected to this program\. The job has waited for 0 s, and waits without limit .*",
        warning,
    )
    assert all(future.cancelled() for future in engine._futures.values())
    assert len(engine._futures) == 2


class CancellingEngine(FullEngine):
    """Starts no node, and loses the first two nodes."""

    def start(self, call, number):
        future = super().start(call, number)
        if number < 2:
            future.set_exception(ConnectionError("it was cancelled in the queue"))
        return future


def test_nodes_that_are_lost_in_the_queue_do_not_lengthen_the_wait(monkeypatch):
    waits = []

    def begin_wait(*args):
        waits.append(queue_wait.QueueWait(*args))
        return waits[-1]

    monkeypatch.setattr(driver, "QueueWait", begin_wait)
    with pytest.raises(mpwatch.LaunchError, match=r"The job has waited for 0\.2 s \(queue_timeout\)$"):
        cluster.run(CancellingEngine(), functions.rank, 1, nodes=1, queue_timeout=0.2)
    assert len(waits) == 1


class CrowdedEngine(cluster.ThreadEngine):
    """Has no room at first, and starts no node before.

    Args:
        questions: after how many it has room.
    """

    def __init__(self, questions):
        super().__init__()
        self.questions = questions

    def describe_wait(self):
        self.questions -= 1
        return "" if self.questions < 0 else f"{self.questions + 1} other jobs have the machines"

    def start(self, call, number):
        assert self.questions < 0
        return super().start(call, number)


def test_nodes_are_started_when_the_cluster_has_room(monkeypatch, caplog):
    monkeypatch.setattr(queue_wait, "FIRST_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(driver, "ROOM_PERIOD", 0.01)
    result = cluster.run(CrowdedEngine(2), functions.rank, 1, nodes=2, queue_timeout=60)
    assert list(result) == [0, 1]
    assert caplog.messages[0].startswith(
        "2 other jobs have the machines. The job has waited for 0 s, and waits for up to 60 s"
    )


def test_a_cluster_without_room_is_an_error_after_queue_timeout():
    with pytest.raises(mpwatch.LaunchError, match=r"other jobs have the machines\. The job has waited for 0\.2 s"):
        cluster.run(CrowdedEngine(10_000), functions.rank, 1, nodes=2, queue_timeout=0.2)


class PlayedNode:
    """A node that the test plays. It has connected."""

    def __init__(self, call):
        (spec,) = call.args
        self.connection = Client(spec.driver, authkey=spec.key)
        self.connection.send(("hello", (spec.number, "host")))

    def send_event(self, kind, **facts):
        event = kind(time=0.0, monotonic=0.0, run_id="job", ranks=(0,), **facts)
        self.connection.send(("event", pickle.dumps(event)))

    def join(self, attempt):
        sizes = {"group_world_size": 1, "world_size": 1, "role_rank": 0, "role_world_size": 1}
        names = {"job": "job", "backend": "c10d", "master_addr": "host", "master_port": 1}
        self.send_event(mpwatch.events.RendezvousCompleted, attempt=attempt, group_rank=0, **sizes, **names)


class PlayedEngine(cluster.ThreadEngine):
    """Starts node 0, which the test plays. All other nodes wait until the test starts them."""

    def __init__(self):
        super().__init__()
        self.calls, self.nodes = {}, {}

    def start(self, call, number):
        self.calls[number] = call
        self._futures[number] = Future()
        if number == 0:
            self.begin(number)
        return self._futures[number]

    def begin(self, number):
        self.nodes[number] = PlayedNode(self.calls[number])

    def finish(self, number, seconds):
        """End the node after these seconds, or when the driver stops the node. Return whether the driver stops it."""
        is_stopped = self.nodes[number].connection.poll(seconds)
        self.nodes[number].connection.send(("end", None))
        self.nodes[number].connection.close()
        self._futures[number].set_result(cluster.NodeOutcome.pack(mpwatch.RunResult(state=mpwatch.WorkerState.SUCCEEDED)))
        return is_stopped

    def close(self):
        super().close()
        for node in self.nodes.values():
            node.connection.close()


def test_a_job_whose_only_node_is_gone_before_it_has_joined_is_an_error():
    engine = PlayedEngine()
    begin = engine.begin
    engine.begin = lambda number: (begin(number), engine.nodes[number].connection.close())
    with pytest.raises(mpwatch.LaunchError, match=r"^no new node of the job has connected to this program\. The job has"):
        cluster.run(engine, functions.rank, 1, nodes=1, queue_timeout=0.5)


def test_queue_timeout_does_not_limit_a_node_that_had_begun_before_the_last_other_node_was_lost():
    engine = PlayedEngine()

    def lose_node_0_when_node_1_has_begun(event):
        if isinstance(event, mpwatch.events.RendezvousCompleted):
            if event.attempt == 0:
                engine.begin(1)
                engine.nodes[1].send_event(mpwatch.events.WorkerReady)
            else:
                engine.ending = engine._executor.submit(engine.finish, 1, seconds=1.0)
        elif isinstance(event, mpwatch.events.WorkerReady):
            engine.nodes[0].connection.close()
        elif isinstance(event, mpwatch.events.Restarting):
            engine.nodes[1].join(attempt=1)

    begin = engine.begin
    engine.begin = lambda number: (begin(number), number == 0 and engine.nodes[0].join(attempt=0))
    options = {"max_restarts": 1, "queue_timeout": 0.5, "last_call_timeout": 0.0}
    result = cluster.run(engine, functions.rank, 1, nodes=(1, 2), on_event=lose_node_0_when_node_1_has_begun, **options)
    assert not engine.ending.result()
    assert result.state is mpwatch.WorkerState.SUCCEEDED


def test_a_late_node_that_could_not_join_is_no_reason_for_a_loss_without_restart():
    engine = PlayedEngine()
    begin, start = engine.begin, engine.start
    engine.begin = lambda number: (begin(number), engine.nodes[0].join(attempt=0))
    refused = cluster.NodeOutcome.pack(mpwatch.LaunchError("it has another version"))

    def lose_node_0_after_node_1(call, number):
        if number == 2:
            engine.nodes[0].connection.close()
        return start(call, number)

    def refuse_node_1(event):
        if isinstance(event, mpwatch.events.RendezvousCompleted):
            engine._futures[1].set_result(refused)

    engine.start = lose_node_0_after_node_1
    with pytest.raises(
        mpwatch.RunFailedError, match=r"with rank 0 was lost: its connection to the driver has broken"
    ) as caught:
        cluster.run(engine, functions.rank, 1, nodes=(1, 2), on_event=refuse_node_1, last_call_timeout=0.0)
    assert "not restarted" not in str(caught.value)


class ForgetfulEngine(cluster.ThreadEngine):
    """Loses node 0 when its ranks are called, although the node is alive."""

    def start(self, call, number):
        future = super().start(call, number)
        if number > 0:
            return future
        self.lost = Future()
        return self.lost

    def lose_node(self, event):
        if isinstance(event, mpwatch.events.CallStarted) and not self.lost.done():
            self.lost.set_exception(ConnectionError("its machine does not answer"))


def test_a_node_that_the_engine_has_lost_does_not_go_on():
    engine = ForgetfulEngine()
    result = cluster.run(
        engine, functions.wait_unless_restarted, 1, nodes=1, args=(1,), max_restarts=1, on_event=engine.lose_node
    )
    assert list(result) == [(0, 1)]


class GhostEngine(cluster.ThreadEngine):
    """Loses node 0 just before it connects. Starts node 1 when node 0 is ended, or after ten seconds."""

    def start(self, call, number):
        if number == 0:
            self.lost_call = call
            lost = Future()
            lost.set_exception(ConnectionError("its machine does not answer"))
            return lost
        return super().start(partial(self.wait_for_end, PlayedNode(self.lost_call), call), number)

    def wait_for_end(self, ghost, call):
        self.is_ended = ghost.connection.poll(10)
        ghost.connection.close()
        return call()


def test_a_node_that_connects_after_the_engine_has_lost_it_does_not_go_on():
    """Otherwise the driver would take it for a node that has begun, and would wait without limit for its outcome."""
    engine = GhostEngine()
    assert list(cluster.run(engine, functions.rank, 1, nodes=1)) == [0]
    assert engine.is_ended


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(mpwatch.LaunchError, match=r"args\[0\], a _thread.lock, which cannot be sent"):
        cluster.run(cluster.ThreadEngine(), print, 1, nodes=1, args=(threading.Lock(),))


@pytest.mark.parametrize("engine", ["ray", cluster.ThreadEngine])
def test_a_bad_engine_is_named(engine):
    with pytest.raises(TypeError, match=r"engine must be an object such as mpwatch\.cluster\.ThreadEngine\(\), not "):
        cluster.run(engine, functions.rank, 1, nodes=1)
