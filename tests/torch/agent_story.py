"""A program: what torch's elastic agent tells its handlers of a run whose rank 1 fails so many times; a JSON line for each."""

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
    def emit(self, line):
        print(line.getMessage(), flush=True)


class Metrics(metrics.MetricHandler):
    def emit(self, metric):
        print(json.dumps([metric.group_name, metric.name, metric.value]), flush=True)


@record
def train(fails):
    if os.environ["RANK"] == "1" and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < fails:
        raise ValueError("boom")
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < fails:
        threading.Event().wait()  # to be stopped


if __name__ == "__main__":
    handlers._log_handlers["told"] = Events()
    metrics.configure(Metrics())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="a1b2c3d4e5",
        role="trainer",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=1,
        monitor_interval=0.02,
        start_method="fork",
        event_log_handler="told",
    )
    with suppress(ChildFailedError):
        elastic_launch(config, train)(int(sys.argv[1]))
