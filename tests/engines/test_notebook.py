"""The cells of docs/how-to/ray.md in a real kernel: output in the cell, values, and the stop button."""

import re

import pytest

from notebooks.kernels import Kernel
from support.process_state import is_alive

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(300)
PREPARE = """
import logging
import os
import signal
import warnings
warnings.simplefilter("ignore")
import ray, mpwatch
from ray.cluster_utils import Cluster
from mpwatch.integrations.ray import run
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": VARIABLES})

def train():
    print("rank", mpwatch.current_worker().rank, "runs", os.getpid(), flush=True)
    return mpwatch.current_worker().rank

def wait():
    train()
    signal.pause()

class TooBadError(Exception):
    pass

def fail():
    if mpwatch.current_worker().rank == 3:
        raise TooBadError("the disk is full")
    signal.pause()
"""


@pytest.fixture(scope="module")
def kernel():
    from support.programs import ENV

    kernel = Kernel()
    kernel.run(PREPARE.replace("VARIABLES", repr({"PYTHONPATH": ENV["PYTHONPATH"]})))
    yield kernel
    kernel.run("ray.shutdown(); cluster.shutdown()")
    kernel.close()


def text_of(outputs):
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def test_values_and_output_come_to_the_cell(kernel):
    outputs = kernel.run("result = run(train, 2, nodes=2)")
    lines = text_of(outputs).splitlines()
    assert sorted(re.sub(r"runs \d+", "runs", line) for line in lines if "runs" in line) == [
        "[0:0] rank 0 runs",
        "[0:1] rank 1 runs",
        "[1:2] rank 2 runs",
        "[1:3] rank 3 runs",
    ]
    assert kernel.value("list(result)") == [0, 1, 2, 3]


def test_a_failure_has_the_exception_of_the_rank(kernel):
    (error,) = [output for output in kernel.run("run(fail, 2, nodes=2)") if output["output_type"] == "error"]
    assert error["ename"] == "RunFailedError"
    assert "TooBadError: the disk is full" in error["evalue"]
    assert kernel.value("type(__import__('sys').last_value.__cause__) is TooBadError") is True


def test_the_stop_button_stops_the_ranks_of_all_nodes(kernel, eventually):
    cell = kernel.start_cell("run(wait, 2, nodes=2)")
    eventually(lambda: text_of(kernel.outputs_of(cell)).count("runs") == 4, 100.0)
    pids = [int(pid) for pid in re.findall(r"runs (\d+)", text_of(kernel.outputs_of(cell)))]
    kernel.interrupt()
    error = kernel.wait_for_cell(cell)[-1]
    assert error["ename"] == "KeyboardInterrupt"
    assert not any(is_alive(pid) for pid in pids)
    assert kernel.value("list(run(lambda: 7, 1, nodes=2))") == [7, 7]
