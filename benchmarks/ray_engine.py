"""Compare jobs on two Ray nodes on this machine: one call of `mpwatch.integrations.ray.run`, the same by hand, and Ray Train.

    python ray_engine.py [times [launcher ...]]     medians of so many runs (default 7), in random order; ten minutes

The launcher "train" needs ray[train].

launcher    run        mpwatch.integrations.ray.run(task, 2, nodes=2)
            by_hand    two Ray tasks, each of which calls mpwatch.run(..., rendezvous=...): what a user would write
            train      TorchTrainer with four workers
figure      entered    from the call until the last rank has entered the function
            total      from the call until the values have come back
            noticed    from the exception in rank 3 to the exception in the driver
            restarted  from the exception in rank 3 until the last rank has entered the function again

Ranks write the time of CLOCK_MONOTONIC to files.
"""

import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import mpwatch
from mpwatch.integrations.ray import run

ROOT = Path(__file__).parents[1]
RANKS = 4
FIGURES = {"start": ("entered", "total"), "fail": ("noticed",), "fail_once": ("restarted",)}


def enter(folder, measure, rank):
    """Run in each rank: note the time, and let rank 3 fail if that is measured."""
    began = time.monotonic()
    is_restart = Path(folder, f"entered_{rank}").exists()
    Path(folder, f"{'restarted' if is_restart else 'entered'}_{rank}").write_text(repr(began))
    if measure == "start" or (measure == "fail_once" and is_restart):
        return
    if rank == RANKS - 1:
        while len(list(Path(folder).glob("entered_*"))) < RANKS:
            time.sleep(0.001)
        Path(folder, "failed").write_text(repr(time.monotonic()))
        raise ValueError("the disk is full")
    while True:
        time.sleep(0.1)


def rank_of_mpwatch(folder, measure):
    return enter(folder, measure, mpwatch.current_worker().rank)


def rank_of_train(config):
    from ray import train

    return enter(config["folder"], config["measure"], train.get_context().get_world_rank())


def launch_run(folder, measure, restarts):
    run(rank_of_mpwatch, 2, nodes=2, args=(folder, measure), backend="gloo", max_restarts=restarts)


@ray.remote(num_cpus=2, max_retries=0)
def run_node(folder, measure, restarts, rendezvous):
    mpwatch.run(
        rank_of_mpwatch,
        2,
        args=(folder, measure),
        backend="gloo",
        max_restarts=restarts,
        rendezvous=mpwatch.Rendezvous(**rendezvous),
    )


@ray.remote(num_cpus=1)
def find_address():
    return ray.util.get_node_ip_address()


def launch_by_hand(folder, measure, restarts):
    group = placement_group([{"CPU": 2}] * 2, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready())
        nodes = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n) for n in range(2)]
        address = ray.get(find_address.options(scheduling_strategy=nodes[0]).remote())
        job = {"endpoint": f"{address}:29417", "run_id": secrets.token_hex(4), "nnodes": 2}
        ray.get(
            [
                run_node.options(scheduling_strategy=nodes[n]).remote(folder, measure, restarts, {**job, "is_host": n == 0})
                for n in range(2)
            ]
        )
    finally:
        remove_placement_group(group)


def launch_train(folder, measure, restarts):
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        rank_of_train,
        train_loop_config={"folder": folder, "measure": measure},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name=secrets.token_hex(4), storage_path=folder, failure_config=FailureConfig(max_failures=restarts)
        ),
    ).fit()


@ray.remote(num_cpus=2)
def import_torch():
    import_module("torch.distributed")


def warm_up():
    """Have a worker process of Ray on each node import torch: the launcher before may have ended the last ones."""
    ray.get([import_torch.options(scheduling_strategy="SPREAD").remote() for _ in range(2)])


LAUNCHERS = {"run": launch_run, "by_hand": launch_by_hand, "train": launch_train}


def measure_once(launcher, measure):
    def read(name):
        return max(float(path.read_text()) for path in Path(folder).glob(f"{name}*"))

    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        try:
            LAUNCHERS[launcher](folder, measure, int(measure == "fail_once"))
        except Exception:
            if measure != "fail":
                raise
        ended = time.monotonic()
        if measure == "start":
            return {"entered": read("entered") - began, "total": ended - began}
        return (
            {"noticed": ended - read("failed")} if measure == "fail" else {"restarted": read("restarted") - read("failed")}
        )


def main(times, launchers):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        for measure, figures in FIGURES.items():
            found = {launcher: [] for launcher in launchers}
            for number in range(times + 1):
                for launcher in random.Random(number).sample(launchers, len(launchers)):  # each may slow down the next one
                    seconds = measure_once(launcher, measure)
                    if number:  # the first one warms up
                        found[launcher].append(seconds)
            for figure in figures:
                for launcher in launchers:
                    values = sorted(seconds[figure] for seconds in found[launcher])
                    print(
                        f"{figure:10} {launcher:8} {statistics.median(values):6.2f} s"
                        f"   ({values[0]:.2f} to {values[-1]:.2f})   load {os.getloadavg()[0]:.1f}",
                        flush=True,
                    )
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7, sys.argv[2:] or list(LAUNCHERS))
