"""A program: print, as JSON lines, the events and metrics that torch's elastic agent sends to its handlers.

python agent_story.py FAILURES     rank 1 fails in the first FAILURES attempts of the run
"""

import json
import logging
import os
import sys
import threading
from contextlib import suppress

from torch.distributed.elastic import metrics
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


class Events(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)


class Metrics(metrics.MetricHandler):
    def emit(self, metric):
        print(json.dumps([metric.group_name, metric.name, metric.value]), flush=True)


@record
def train(failures):
    if os.environ["RANK"] == "1" and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < failures:
        raise ValueError("boom")
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < failures:
        threading.Event().wait()  # until the rank is stopped


if __name__ == "__main__":
    handlers._log_handlers["test"] = Events()
    metrics.configure(Metrics())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="a1b2c3d4e5",
        role="default",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=1,
        monitor_interval=0.02,
        start_method="fork",
        event_log_handler="test",
    )
    with suppress(ChildFailedError):
        elastic_launch(config, train)(int(sys.argv[1]))
