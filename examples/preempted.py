"""Save and end when the machine is taken back, and go on later: the final weights are those of an undisturbed training.

A scheduler takes machines back. Some time before, it sends a signal to your program: SLURM with `--signal=USR1@120`,
Kubernetes with SIGTERM. Then `mpwatch.should_stop(step)` becomes True in all ranks at one and the same step. Rank 0 saves
the checkpoint, all ranks return, and the program ends with status 75. A job script starts it again while the status is 75.

Run it with `python examples/preempted.py CHECKPOINT`, and send it SIGUSR1 or SIGTERM. Without an argument it keeps the
checkpoint in a temporary folder, and requests three stops itself, at random steps.
"""

import random
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from train_digits import DigitNet, digits

import mpwatch

NPROCS = 2
STEPS = 120
BATCH = 32
STOPPED = 75  # EX_TEMPFAIL: try again later
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


def train(images: torch.Tensor, labels: torch.Tensor, path: Path, request_at: int | None) -> float:
    """Train in each rank, from the checkpoint on if there is one. Return the sum of all weights.

    Rank 1 requests a stop at the step `request_at`.
    """
    torch.manual_seed(1)
    model = DigitNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    first_step = 0
    if path.exists():
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_step = checkpoint["step"]
    for step in range(first_step, STEPS):
        if mpwatch.should_stop(step):  # in all ranks at the same step, so no rank waits for another one below
            if dist.get_rank() == 0:
                save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
            break
        if step == request_at and dist.get_rank() == 1:
            mpwatch.request_stop()
        rng = torch.Generator().manual_seed(step * NPROCS + dist.get_rank())
        batch = torch.randint(len(labels), (BATCH,), generator=rng)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        mpwatch.report(step=step + 1, total=STEPS)
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


def save(path: Path, checkpoint: dict[str, object]) -> None:
    """Write the checkpoint in one step, so that it is whole even if this process is killed meanwhile."""
    new = path.with_suffix(".new")
    torch.save(checkpoint, new)
    new.replace(path)


def run_once(path: Path, request_at: int | None = None) -> mpwatch.RunResult[float]:
    """Train until the end, or until a stop is requested."""
    training, _ = digits()
    args = (*training.tensors, path, request_at)
    result = mpwatch.run(train, NPROCS, args=args, backend="gloo", stop=mpwatch.StopPolicy(SIGNALS, timeout=100))
    if result.stopped_at is not None:
        print(f"stopped at step {result.stopped_at} ({result.stop_cause})", flush=True)
    return result


if __name__ == "__main__":
    if len(sys.argv) > 1:
        result = run_once(Path(sys.argv[1]))
        if result.stopped_at is not None:
            sys.exit(STOPPED)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "checkpoint.pt")
            for step in sorted(random.sample(range(STEPS - 20), 3)):
                run_once(path, step)
            result = run_once(path)
    print(f"weights {result[0]:.12f}")
