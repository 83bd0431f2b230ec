"""The events and metrics that handlers of torch.distributed.elastic receive, compared with those of torch's own agent."""

import json
import logging
import os
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.metrics import api as metrics_api

import mpwatch
from mpwatch import FailureKind, WorkerState
from mpwatch.events import CallStarted, Restarting, TorchElasticEvents, WorkerExited, WorkerFailed, WorkerSucceeded
from support.event_streams import EventHistory, failed_run, failure, moved_node_run, restarted_run
from support.programs import ENV, python
from watcher.restarts import attempt_functions

HERE = Path(__file__).parent
STATUS = "torchelastic.worker.status."
RENDEZVOUS_EVENTS = {STATUS + "RENDEZVOUS", STATUS + "ASSIGN_WORKER_RANKS"}  # a run on one machine has no rendezvous


class RecordingHandler(logging.Handler, metrics.MetricHandler):
    """A handler of events and of metrics. It stores them."""

    def __init__(self):
        super().__init__()
        self.events, self.metrics = [], []

    def emit(self, item):
        if isinstance(item, logging.LogRecord):
            self.events.append(json.loads(item.getMessage()))
        else:
            self.metrics.append((item.group_name, item.name, item.value))

    @property
    def names(self):
        """Return the names and the ranks of the events."""
        return [(line["name"].removeprefix(STATUS), line["metadata"]["global_rank"]) for line in self.events]

    def metric(self, name):
        return [value for _, found, value in self.metrics if found == f"workers.default.{name}"]


@pytest.fixture
def recorded():
    handler = RecordingHandler()
    handlers._log_handlers["test"] = handler
    metrics.configure(handler, "torchelastic")
    yield handler
    del handlers._log_handlers["test"]
    del metrics_api._metrics_map["torchelastic"]
    logger = events._events_loggers.pop("test", None)
    if logger is not None:
        logger.removeHandler(handler)
    handler.close()


def send_events(stream):
    observe = TorchElasticEvents("test")
    for event in stream:
        observe(event)


@cache
def record_torch_agent(failures):
    """Record the events and metrics of torch's agent. This takes some seconds."""
    env = {name: value for name, value in ENV.items() if name != "PYTHONWARNINGS"}
    recorded = RecordingHandler()
    for line in python(str(HERE / "agent_story.py"), str(failures), env=env).stdout.splitlines():
        item = json.loads(line)
        (recorded.events if isinstance(item, dict) else recorded.metrics).append(item)
    recorded.events = [line for line in recorded.events if line["name"] not in RENDEZVOUS_EVENTS]
    recorded.close()
    return recorded


def normalize(line):
    """Return the parts of an event that are equal in each run, of mpwatch or of torch's agent."""
    metadata = dict(line["metadata"])
    inner = json.loads(metadata["metadata"])
    raw_error = metadata["raw_error"] and json.loads(metadata["raw_error"])
    if raw_error:
        extra = raw_error["message"]["extraInfo"]
        assert isinstance(extra["timestamp"], str)
        extra.update(timestamp="", py_callstack=extra["py_callstack"].splitlines()[-1])
    if inner.get("worker_pid", [None]) != [None]:
        assert metadata["worker_id"].isdecimal()
        inner["worker_pid"] = [int]
    metadata.update(metadata=inner, raw_error=raw_error, worker_id=type(metadata["worker_id"]))
    metadata.update(dict.fromkeys(("hostname", "rdzv_backend"), str), total_run_time=int)
    return line["name"], line["source"], metadata


def end_metrics(recorded):
    """Return the remaining restarts at each end of an attempt, and the metrics of the whole run."""
    found = [
        (name.removeprefix("workers.default."), value) for _, name, value in recorded.metrics if name.startswith("workers.")
    ]
    ends = [pair for pair in pairwise(found) if pair[0][0] == "remaining_restarts" and pair[1][0] in ("failed", "succeeded")]
    return ends, found[found.index(next(item for item in found if item[0] == "flakiness")) :]


@pytest.mark.parametrize(("failures", "stream"), [(1, restarted_run), pytest.param(2, failed_run, marks=pytest.mark.slow)])
def test_events_and_metrics_equal_those_of_torch_s_agent(recorded, failures, stream):
    expected = record_torch_agent(failures)
    send_events(stream())
    assert [normalize(line) for line in recorded.events] == [normalize(line) for line in expected.events]
    assert end_metrics(recorded) == end_metrics(expected)
    assert {group for group, _, _ in recorded.metrics} == {"torchelastic"}


@pytest.mark.parametrize("failures", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_real_run_sends_the_events_of_torch_s_agent(recorded, failures):
    expected = record_torch_agent(failures)
    observe = TorchElasticEvents("test")
    mpwatch.run(attempt_functions.fails, 2, args=(failures,), max_restarts=1, check=False, on_event=observe)
    assert recorded.names == expected.names
    assert [line["metadata"].keys() for line in recorded.events] == [line["metadata"].keys() for line in expected.events]
    assert end_metrics(recorded) == end_metrics(expected)


def test_each_state_is_a_metric(recorded):
    send_events(restarted_run())
    states = ("init", "healthy", "unhealthy", "failed", "succeeded")
    assert [recorded.metric(state) for state in states] == [[1, 1], [1, 1], [1], [1], [1]]
    assert recorded.metric("remaining_restarts") == [1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(("max_restarts", "flakiness"), [(0, 0), (1, 0), (3, 0)])
def test_a_run_without_failures_is_not_flaky(recorded, max_restarts, flakiness):
    send_events(EventHistory(max_restarts=max_restarts).start_and_call().succeed(1.0).end(1.2))
    assert recorded.metric("flakiness") == [flakiness]
    assert recorded.metric("run_success_no_retries") == [1]
    assert recorded.names == [("START", 0), ("START", 1), ("SUCCEEDED", 0), ("SUCCEEDED", 1), ("SUCCEEDED", None)]


def test_events_have_their_times(recorded):
    stream = restarted_run()
    send_events(stream)
    assert recorded.events[0]["timestamp"] == int(stream[2].time * 1000)
    assert recorded.events[-1]["timestamp"] == int(stream[-1].time * 1000)
    assert recorded.events[-1]["metadata"]["total_run_time"] == 4


def test_a_rank_that_did_not_raise_has_the_same_form_of_error(recorded):
    killed = {"kind": FailureKind.SIGNAL, "signal": 9, "exit_code": 137, "stack": "File ..."}
    history = EventHistory(max_restarts=0).start_and_call().fail_rank_1(**killed).change_state(WorkerState.FAILED, 2.0)
    send_events(history.end(2.1, reason="rank 1 was killed by SIGKILL"))
    (event,) = (line for line in recorded.events if line["name"] == STATUS + "FAILED")
    message = json.loads(event["metadata"]["raw_error"])["message"]
    assert message["message"].startswith("rank 1: was killed by SIGKILL")
    assert message["extraInfo"]["py_callstack"] == "File ..."
    assert json.loads(event["metadata"]["metadata"])["exit_code"] == [-9]


def test_an_interrupted_run_is_neither_a_success_nor_a_failure(recorded):
    history = EventHistory().start_and_call().change_state(WorkerState.UNHEALTHY, 1.0).change_state(WorkerState.STOPPED, 1.5)
    send_events(history.end(1.5, reason="the watcher received SIGTERM"))
    assert recorded.names[2:] == [("TERMINATED", 0), ("TERMINATED", 1), ("FAILED", None)]
    assert recorded.events[-1]["metadata"]["raw_error"] == "the watcher received SIGTERM"
    assert not recorded.metric("run_total")
    assert recorded.metric("stopped") == [1]


def test_ranks_of_several_nodes_have_the_numbers_of_their_round(recorded):
    send_events(moved_node_run())
    worker = [line for line in recorded.events if line["source"] == "WORKER"]
    starts = [line for line in worker if line["name"] == STATUS + "START"]
    assert [line["metadata"]["global_rank"] for line in starts] == [4, 5, 2, 3, 2, 3]
    assert recorded.names[6:] == [("SUCCEEDED", 2), ("SUCCEEDED", 3), ("SUCCEEDED", None)]
    last = worker[-1]["metadata"]
    assert (last["run_id"], last["group_rank"], last["rdzv_backend"]) == ("job", 1, "c10d")
    details = json.loads(last["metadata"])
    assert (details["group_world_size"], details["role_rank"], details["role_world_size"]) == (3, [3], [6])
    assert details["local_rank"] == [1]


def test_new_nodes_do_not_count_as_a_retry(recorded):
    send_events(moved_node_run())
    assert recorded.metric("failed") == [1]
    assert recorded.events[-1]["metadata"]["agent_restarts"] == 1
    assert recorded.metric("remaining_restarts") == [2] * 4 + [1] * 6


def test_a_failed_rendezvous_is_a_failure_of_the_agent(recorded):
    history = EventHistory(is_multi_node=True).change_state(WorkerState.FAILED, 1.0)
    send_events(history.end(1.0, reason="1 of 2 nodes had come after 600.0 s"))
    assert recorded.names == [("FAILED", None)]
    assert recorded.events[0]["metadata"]["raw_error"] == "1 of 2 nodes had come after 600.0 s"


def test_a_run_that_could_not_start_is_a_failure_of_the_agent(recorded):
    send_events(EventHistory().change_state(WorkerState.FAILED, 0.1).end(0.1, reason="no process could be started"))
    assert recorded.names == [("TERMINATED", 0), ("TERMINATED", 1), ("FAILED", None)]
    assert recorded.metric("run_failed_no_retries") == [1]


def test_a_closed_group_has_succeeded_and_its_ranks_have_the_state_of_their_last_call(recorded):
    history = (
        EventHistory(fn="")
        .start_and_call()
        .add_for_each_rank(WorkerSucceeded, 1.0)
        .add(CallStarted, 2.0)
        .add(WorkerSucceeded, 2.5, (0,))
    )
    history.add(WorkerFailed, 2.5, (1,), failure=failure(1), is_root_cause=True)
    send_events(history.change_state(WorkerState.STOPPED, 3.0).end(3.1))
    assert recorded.names[2:] == [("SUCCEEDED", 0), ("FAILED", 1), ("SUCCEEDED", None)]
    assert recorded.metric("run_success_no_retries") == [1]


def test_a_rank_that_is_restarted_alone(recorded):
    history = (
        EventHistory(nprocs=3)
        .start_and_call()
        .add(WorkerSucceeded, 0.9, (0,))
        .add(WorkerExited, 1.0, (1,), pid=101, exit_code=1)
    )
    history.add(WorkerFailed, 1.0, (1,), failure=failure(1), is_root_cause=True)
    history.add(Restarting, 1.0, (1,), cause=failure(1), delay=0.0, restarts_left=0).start_ranks(1.0, 1, (1,))
    history.add(WorkerSucceeded, 2.0, (1,), attempt=1).add(WorkerSucceeded, 3.0, (2,)).change_state(
        WorkerState.SUCCEEDED, 3.0
    )
    send_events(history.end(3.1))
    assert recorded.names[3:] == [("START", 1), *(("SUCCEEDED", rank) for rank in (0, 1, 2, None))]
    assert recorded.metric("remaining_restarts")[-1] == 0
    assert recorded.metric("run_success_with_retries") == [1]


def test_one_observer_serves_several_runs(recorded):
    both = zip(restarted_run(), EventHistory(run_id="b").start_and_call().succeed(1.0).end(1.2) + [None] * 100, strict=False)
    observe = TorchElasticEvents("test")
    for event in (event for pair in both for event in pair if event is not None):
        observe(event)
    of_b = [line["name"].removeprefix(STATUS) for line in recorded.events if line["metadata"]["run_id"] == "b"]
    assert of_b == ["START", "START", "SUCCEEDED", "SUCCEEDED", "SUCCEEDED"]
    assert len(recorded.events) == 5 + 7
    assert not observe._runs


def test_a_run_without_its_first_event_is_ignored(recorded):
    send_events(restarted_run()[1:])
    assert not recorded.events
    assert not recorded.metrics


def test_an_unregistered_handler_is_an_error_at_once():
    with pytest.raises(ValueError, match="'nonsense' is not"):
        TorchElasticEvents("nonsense")
    TorchElasticEvents()


def test_a_missing_torch_is_a_clear_error(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    program = (
        "from mpwatch.events import TorchElasticEvents\ntry: TorchElasticEvents()\nexcept ImportError as error: print(error)"
    )
    env = {**ENV, "PYTHONPATH": os.pathsep.join([str(tmp_path), ENV["PYTHONPATH"]])}
    assert "which cannot be imported here: no torch here. Install torch" in python("-c", program, env=env).stdout
