"""Resume a training after failures: a random rank is killed twice, and the final weights equal those of a run without kills.

After each epoch rank 0 writes a checkpoint with all that later epochs depend on. When a rank has failed, mpwatch restarts
all ranks, and they resume from the checkpoint. Run it with `python examples/resume.py`. With an argument, as in
`python examples/resume.py trace.json`, it also writes the timeline for https://ui.perfetto.dev.
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from train_digits import DigitNet, Outcome, accuracy, digits

import mpwatch
from mpwatch.events import Event, StateChanged, WorkerStarted

NPROCS = 2
EPOCHS = 12
KILLS = 2


def train(training: TensorDataset, test: TensorDataset, path: Path) -> Outcome:
    """Train in each rank, from the checkpoint on if there is one."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DigitNet()
    torch.manual_seed(2 + rank)  # each rank has noise of its own
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    sampler = DistributedSampler(training, seed=2)
    losses: list[float] = []
    if path.exists():
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"][rank])
        losses = checkpoint["losses"]
    for epoch in range(len(losses), EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        batches = DataLoader(training, batch_size=32, sampler=sampler)
        for images, labels in batches:
            optimizer.zero_grad()
            noisy = images + 0.1 * torch.randn_like(images)
            loss = nn.functional.cross_entropy(model(noisy), labels)
            loss.backward()
            average_gradients(model)
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(float(total) / len(batches) / NPROCS)
        mpwatch.report(step=epoch + 1, total=EPOCHS, loss=losses[-1])
        rng: list[Any] = [None] * NPROCS
        dist.all_gather_object(rng, torch.get_rng_state())
        if rank == 0:
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng, "losses": losses}, path)
    return Outcome(losses, accuracy(model, test), model.state_dict())


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over all ranks.

    DistributedDataParallel would do it too, but its first step adds up in another order than later steps. Then a resumed run
    would round differently, and differ by a millionth from a run without kills.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    together = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(together)
    nn.utils.vector_to_parameters(together / NPROCS, gradients)


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Replace the checkpoint in one step. If the rank is killed before that, the last checkpoint stays."""
    unfinished = path.with_suffix(".new")
    torch.save(checkpoint, unfinished)
    os.replace(unfinished, path)


class RankKiller:
    """An observer that kills a random rank at a random time, in each of the first attempts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pids: dict[int, int] = {}  # by rank

    def __call__(self, event: Event) -> None:
        """Record the pids of the ranks. Start a thread that kills one of them when all are ready."""
        if isinstance(event, WorkerStarted):
            self.pids[event.ranks[0]] = event.pid
        elif isinstance(event, StateChanged) and event.after is mpwatch.WorkerState.HEALTHY and event.attempt < KILLS:
            threading.Thread(target=self.kill_random_rank, args=(event.attempt,), daemon=True).start()

    def kill_random_rank(self, attempt: int) -> None:
        """Wait for a random epoch, early enough that no rank has finished, and kill a random rank."""
        epoch = 4 * attempt + random.randint(0, 3)
        while self.count_saved_epochs() < epoch:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.1))
        os.kill(self.pids[random.randrange(NPROCS)], signal.SIGKILL)

    def count_saved_epochs(self) -> int:
        """Return the number of epochs in the checkpoint."""
        return len(torch.load(self.path)["losses"]) if self.path.exists() else 0


def describe(attempt: mpwatch.Attempt) -> str:
    """Return how an attempt ended."""
    cause = attempt.root_cause
    if cause is None:
        return attempt.state.name
    return f"rank {cause.rank} failed first: {cause.kind.name} {cause.signal or cause.summary}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        data, undisturbed, disturbed = digits(), Path(folder, "undisturbed.pt"), Path(folder, "disturbed.pt")
        expected = mpwatch.run(train, NPROCS, args=(*data, undisturbed), backend="gloo")[0]
        result = mpwatch.run(
            train,
            NPROCS,
            args=(*data, disturbed),
            backend="gloo",
            max_restarts=3,
            on_event=RankKiller(disturbed),
        )
    for attempt in result.attempts:
        print(f"attempt {attempt.number}: {attempt.elapsed:.1f} s, {describe(attempt)}")
    if len(sys.argv) > 1:
        result.to_chrome_trace(sys.argv[1])
    reached = result[0]
    is_same = all(torch.equal(tensor, reached.weights[name]) for name, tensor in expected.weights.items())
    print(f"test accuracy: {reached.accuracy:.1%}, undisturbed {expected.accuracy:.1%}; the same weights: {is_same}")
