"""One job on several nodes: each makes this same call, and ranks on all of them fit one line to their shares of the points.

On one machine, in two shells (the first node serves the store):

    python examples/several_nodes.py 127.0.0.1:29400
    python examples/several_nodes.py 127.0.0.1:29400

On several, where `node0` is the name of the first: `python several_nodes.py node0:29400 my-job 2` on each; 1-2: it goes on
with one of the two, and takes in the other when it comes back. SLURM and Kubernetes say all that in variables: see
slurm.sbatch and kubernetes.yaml. MPWATCH_SECRET, the same on all nodes and known to nobody else, has them sign what they
tell one another.

When a rank has failed, or nodes have come or gone, all ranks are started again together, and go on from what rank 0 has kept
in KEEP, a folder of this job's that all nodes see; from the start, if it is not set.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import mpwatch

STEPS = 200
POINTS = 4000


def train(folder: str) -> tuple[float, float]:
    """What each rank does: its share of the points, and the mean of all gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()  # of the attempt: there may be more or fewer ranks than before
    draw = random.Random(rank)
    x = torch.tensor([draw.uniform(-1.0, 1.0) for _ in range(POINTS // size)])
    y = 3.0 * x + 2.0 + 0.1 * torch.sin(50.0 * x)
    kept = Path(folder, "line.json") if folder else None
    line, begin = torch.zeros(2), 0
    if kept is not None and kept.exists():
        slope, intercept, begin = json.loads(kept.read_text())
        line = torch.tensor([slope, intercept])
    dist.broadcast(line, 0)
    begin_at = torch.tensor(begin)
    dist.broadcast(begin_at, 0)  # rank 0 may have kept another one meanwhile
    for step in range(int(begin_at), STEPS):
        errors = line[0] * x + line[1] - y
        gradient = torch.stack([(errors * x).mean(), errors.mean()])
        dist.all_reduce(gradient)
        line -= gradient / size
        mpwatch.report(step=step + 1, total=STEPS)
        if kept is not None and rank == 0:
            new = kept.with_suffix(".new")
            new.write_text(json.dumps([*line.tolist(), step + 1]))
            new.replace(kept)  # whole, or not at all
    return float(line[0]), float(line[1])


def rendezvous() -> mpwatch.Rendezvous:
    """From the command line, else from the environment: endpoint, name of the job, number of nodes or least-most."""
    names = ("ENDPOINT", "RUN_ID", "NNODES")
    usual = ("127.0.0.1:29400", "several-nodes", "2")
    told = sys.argv[1:]
    endpoint, run_id, nnodes = (told[n] if n < len(told) else os.environ.get(name, usual[n]) for n, name in enumerate(names))
    least, _, most = nnodes.partition("-")
    return mpwatch.Rendezvous(endpoint, run_id=run_id, nnodes=(int(least), int(most or least)))


if __name__ == "__main__":
    result = mpwatch.main(
        train,
        nprocs=int(os.environ.get("NPROCS", "2")),
        args=(os.environ.get("KEEP", ""),),
        backend="gloo",  # with GPUs: "nccl", and nprocs="gpu"
        max_restarts=3,
        rendezvous=rendezvous(),
    )
    for rank, (slope, intercept) in result.return_values.items():
        print(f"rank {rank} of {result.workers[0].world_size}: y = {slope:.2f} x + {intercept:.2f}")
