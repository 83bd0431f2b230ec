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
from mpwatch.events import TorchElasticEvents
from support.event_streams import moved_node_run
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


def test_ranks_of_several_nodes_have_the_numbers_of_their_round(recorded):
    send_events(moved_node_run())
    last = [line for line in recorded.events if line["source"] == "WORKER"][-1]["metadata"]
    assert (last["run_id"], last["group_rank"], last["rdzv_backend"]) == ("job", 1, "c10d")
    expected = {"group_world_size": 3, "role_rank": [3], "role_world_size": [6], "local_rank": [1]}
    assert json.loads(last["metadata"]).items() >= expected.items()


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
