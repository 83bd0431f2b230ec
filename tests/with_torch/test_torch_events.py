"""The events and metrics that handlers of torch.distributed.elastic receive, compared with those of torch's own agent."""

import json
import logging
import os
from itertools import pairwise
from pathlib import Path

import pytest
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.metrics import api as metrics_api

import mpwatch
from mpwatch import FailureKind, WorkerState
from mpwatch.events import CallStarted, Restarting, TorchElasticEvents, WorkerFailed, WorkerSucceeded
from support.event_streams import EventHistory, failure, moved_node_run, restarted_run
from support.programs import ENV, python
from with_torch.agent_story import fail_at_first

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


def record_torch_agent(failures):
    env = {name: value for name, value in ENV.items() if name != "PYTHONWARNINGS"}
    recorded = RecordingHandler()
    program = str(Path(__file__).with_name("agent_story.py"))
    for line in python(program, str(failures), env=env).stdout.splitlines():
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
    metadata.update(dict.fromkeys(("run_id", "hostname", "rdzv_backend"), str), total_run_time=int)
    return line["name"], line["source"], metadata


def end_metrics(recorded):
    """Return the remaining restarts at each end of an attempt, and the metrics of the whole run."""
    found = [
        (name.removeprefix("workers.default."), value) for _, name, value in recorded.metrics if name.startswith("workers.")
    ]
    ends = [pair for pair in pairwise(found) if pair[0][0] == "remaining_restarts" and pair[1][0] in ("failed", "succeeded")]
    return ends, found[found.index(next(item for item in found if item[0] == "flakiness")) :]


@pytest.mark.slow
@pytest.mark.parametrize("failures", [1, 2])
def test_a_run_sends_the_events_and_metrics_of_torch_s_agent(recorded, failures):
    expected = record_torch_agent(failures)
    mpwatch.run(fail_at_first, 2, args=(failures,), max_restarts=1, check=False, on_event=TorchElasticEvents("test"))
    assert [normalize(line) for line in recorded.events] == [normalize(line) for line in expected.events]
    assert end_metrics(recorded) == end_metrics(expected)
    assert {group for group, _, _ in recorded.metrics} == {"torchelastic"}


def interrupted_run():
    history = EventHistory().start_and_call().change_state(WorkerState.UNHEALTHY, 1.0)
    return history.change_state(WorkerState.STOPPED, 1.5).end(1.5, reason="the watcher received SIGTERM")


def closed_group():
    history = EventHistory(fn="").start_and_call().add_for_each_rank(WorkerSucceeded, 1.0).add(CallStarted, 2.0)
    history.add(WorkerSucceeded, 2.5, (0,)).add(WorkerFailed, 2.5, (1,), failure=failure(1), is_root_cause=True)
    return history.change_state(WorkerState.STOPPED, 3.0).end(3.1)


def run_with_a_rank_restarted_alone():
    history = EventHistory(nprocs=3).start_and_call().add(WorkerSucceeded, 0.9, (0,))
    history.add(WorkerFailed, 1.0, (1,), failure=failure(1), is_root_cause=True)
    history.add(Restarting, 1.0, (1,), cause=failure(1), delay=0.0, restarts_left=0).start_ranks(1.0, 1, (1,))
    history.add(WorkerSucceeded, 2.0, (1,), attempt=1).add(WorkerSucceeded, 3.0, (2,))
    return history.change_state(WorkerState.SUCCEEDED, 3.0).end(3.1)


NO_NODES = EventHistory(is_multi_node=True).change_state(WorkerState.FAILED, 1.0).end(1.0, reason="no node")
STARTS = [("START", 0), ("START", 1)]


@pytest.mark.parametrize(
    ("stream", "names", "last_error", "found"),
    [
        pytest.param(
            EventHistory(max_restarts=3).start_and_call().succeed(1.0).end(1.2),
            [*STARTS, ("SUCCEEDED", 0), ("SUCCEEDED", 1), ("SUCCEEDED", None)],
            None,
            {"flakiness": [0], "run_success_no_retries": [1]},
            id="sound",
        ),
        pytest.param(
            interrupted_run(),
            [*STARTS, ("TERMINATED", 0), ("TERMINATED", 1), ("FAILED", None)],
            "the watcher received SIGTERM",
            {"run_total": [], "stopped": [1]},
            id="interrupted",
        ),
        pytest.param(NO_NODES, [("FAILED", None)], "no node", {}, id="no rendezvous"),
        pytest.param(
            closed_group(),
            [*STARTS, ("SUCCEEDED", 0), ("FAILED", 1), ("SUCCEEDED", None)],
            None,
            {"run_success_no_retries": [1]},
            id="group",
        ),
        pytest.param(
            run_with_a_rank_restarted_alone(),
            [*STARTS, ("START", 2), ("START", 1), *(("SUCCEEDED", rank) for rank in (0, 1, 2, None))],
            None,
            {"run_success_with_retries": [1]},
            id="scope worker",
        ),
        pytest.param(
            moved_node_run(),  # new nodes do not count as a retry
            [*(("START", rank) for rank in (4, 5, 2, 3, 2, 3)), *(("SUCCEEDED", rank) for rank in (2, 3, None))],
            None,
            {"failed": [1], "remaining_restarts": [2] * 4 + [1] * 6},
            id="several nodes",
        ),
    ],
)
def test_the_ends_of_runs(recorded, stream, names, last_error, found):
    send_events(stream)
    assert recorded.names == names
    assert recorded.events[-1]["metadata"]["raw_error"] == last_error
    assert {name: recorded.metric(name) for name in found} == found


def test_ranks_of_several_nodes_have_the_numbers_of_their_round(recorded):
    send_events(moved_node_run())
    last = [line for line in recorded.events if line["source"] == "WORKER"][-1]["metadata"]
    assert (last["run_id"], last["group_rank"], last["rdzv_backend"]) == ("job", 1, "c10d")
    expected = {"group_world_size": 3, "role_rank": [3], "role_world_size": [6], "local_rank": [1]}
    assert json.loads(last["metadata"]).items() >= expected.items()


def test_a_rank_that_did_not_raise_has_the_same_form_of_error(recorded):
    killed = {"kind": FailureKind.SIGNAL, "signal": 9, "exit_code": 137, "stack": "File ..."}
    history = EventHistory(max_restarts=0).start_and_call().fail_rank_1(**killed).change_state(WorkerState.FAILED, 2.0)
    send_events(history.end(2.1, reason="rank 1 was killed by SIGKILL"))
    (event,) = (line for line in recorded.events if line["name"] == STATUS + "FAILED")
    message = json.loads(event["metadata"]["raw_error"])["message"]
    assert message["message"].startswith("rank 1: was killed by SIGKILL")
    assert message["extraInfo"]["py_callstack"] == "File ..."
    assert json.loads(event["metadata"]["metadata"])["exit_code"] == [-9]


def test_one_observer_serves_several_runs(recorded):
    stream, other = restarted_run(), EventHistory(run_id="b").start_and_call().succeed(1.0).end(1.2)
    both = zip(stream, other + [None] * 100, strict=False)
    send_events(event for pair in both for event in pair if event is not None)
    of_b = [line["name"].removeprefix(STATUS) for line in recorded.events if line["metadata"]["run_id"] == "b"]
    assert of_b == ["START", "START", "SUCCEEDED", "SUCCEEDED", "SUCCEEDED"]
    assert len(recorded.events) == 5 + 7
    assert recorded.events[-1]["timestamp"] == int(stream[-1].time * 1000)
    assert recorded.events[-1]["metadata"]["total_run_time"] == 4


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
