"""Run one job on several nodes: each node makes the same call, and all ranks together fit a line to points.

On one machine, in two shells (the coordinator runs in the first one):

    python examples/several_nodes.py 127.0.0.1:29400
    python examples/several_nodes.py 127.0.0.1:29400

On several machines, run `python several_nodes.py node0:29400 my-job 2` on each, where `node0` is the name of the first.
With 1-2 instead of 2 the job continues if one of two nodes is lost, and takes it in when it comes back. slurm.sbatch and
kubernetes.yaml set variables instead of arguments. If MPWATCH_SECRET is set, to the same secret value on all nodes, the
nodes sign their messages.

When a rank has failed, or nodes have joined or left, all ranks are restarted together. They resume from the checkpoint that
rank 0 has written to the folder KEEP, which all nodes must see. If KEEP is not set, they begin again.

If one node gets SIGUSR1, which SLURM sends some time before it takes the nodes back, all ranks stop at the same step. Then
each node ends with status 75.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import mpwatch

STEPS = 200
POINTS = 4000
STOPPED = 75  # EX_TEMPFAIL: try again later


def train(folder: str) -> tuple[float, float]:
    """Fit a line to the points of all ranks. Each rank has its share, and uses the mean of all gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()  # after a restart there may be more or fewer ranks
    draw = random.Random(rank)
    x = torch.tensor([draw.uniform(-1.0, 1.0) for _ in range(POINTS // size)])
    y = 3.0 * x + 2.0 + 0.1 * torch.sin(50.0 * x)
    checkpoint = Path(folder, "line.json") if folder else None
    line, begin = torch.zeros(2), 0
    if checkpoint is not None and checkpoint.exists():
        slope, intercept, begin = json.loads(checkpoint.read_text())
        line = torch.tensor([slope, intercept])
    dist.broadcast(line, 0)
    begin_at = torch.tensor(begin)
    dist.broadcast(begin_at, 0)  # ranks may have read different checkpoints
    for step in range(int(begin_at), STEPS):
        if mpwatch.should_stop(step):  # in all ranks at the same step, which is also that of the checkpoint
            break
        errors = line[0] * x + line[1] - y
        gradient = torch.stack([(errors * x).mean(), errors.mean()])
        dist.all_reduce(gradient)
        line -= gradient / size
        mpwatch.report(step=step + 1, total=STEPS)
        if checkpoint is not None and rank == 0:
            new = checkpoint.with_suffix(".new")
            new.write_text(json.dumps([*line.tolist(), step + 1]))
            new.replace(checkpoint)  # in one step: a checkpoint is never incomplete
    return float(line[0]), float(line[1])


def read_rendezvous() -> mpwatch.Rendezvous:
    """Read endpoint, name of the job and number of nodes (N or MIN-MAX) from the command line or the environment."""
    names = ("ENDPOINT", "RUN_ID", "NNODES")
    defaults = ("127.0.0.1:29400", "several-nodes", "2")
    given = sys.argv[1:]
    endpoint, run_id, nnodes = (
        given[n] if n < len(given) else os.environ.get(name, defaults[n]) for n, name in enumerate(names)
    )
    smallest, _, largest = nnodes.partition("-")
    return mpwatch.Rendezvous(endpoint, run_id=run_id, nnodes=(int(smallest), int(largest or smallest)))


if __name__ == "__main__":
    result = mpwatch.main(
        train,
        nprocs=int(os.environ.get("NPROCS", "2")),
        args=(os.environ.get("KEEP", ""),),
        backend="gloo",  # with GPUs: "nccl", and nprocs="gpu"
        max_restarts=3,
        rendezvous=read_rendezvous(),
        stop=[signal.SIGUSR1],
    )
    for rank, (slope, intercept) in result.items():
        print(f"rank {rank} of {result.workers[0].world_size}: y = {slope:.2f} x + {intercept:.2f}")
    if result.stopped_at is not None:
        sys.exit(STOPPED)
