"""A program: print, as JSON lines, the events and metrics that torch's elastic agent sends to its handlers.

python agent_story.py FAILURES     rank 1 fails in the first FAILURES attempts of the run
"""

import json
import logging
import os
import sys
import threading
from contextlib import suppress


def fail_at_first(failures):
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < failures:
        if os.environ["RANK"] == "1":
            raise ValueError("boom")
        threading.Event().wait()  # until the rank is stopped


def print_story(failures):
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

    handlers._log_handlers["test"] = Events()
    metrics.configure(Metrics())
    nodes = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "local_addr": "127.0.0.1", "rdzv_endpoint": "127.0.0.1:0"}
    job = {"run_id": "a1b2c3d4e5", "role": "default", "rdzv_backend": "c10d", "max_restarts": 1}
    options = {"monitor_interval": 0.02, "start_method": "fork", "event_log_handler": "test"}
    with suppress(ChildFailedError):
        elastic_launch(LaunchConfig(**nodes, **job, **options), record(fail_at_first))(failures)


if __name__ == "__main__":
    print_story(int(sys.argv[1]))
