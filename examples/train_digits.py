"""Train a small convolutional net on handwritten digits: data-parallel on four ranks, from one ordinary script.

The data are the 1,797 images that come with scikit-learn (UCI, "Optical Recognition of Handwritten Digits"). Run it with
`python examples/train_digits.py`: it takes about 15 seconds on two cores. With `--crash`, rank 2
fails in epoch 5; the ranks are restarted once, and the report of the second failure ends the program.
"""

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpwatch


@dataclass
class Outcome:
    """The result of a rank."""

    losses: list[float]
    accuracy: float
    weights: dict[str, torch.Tensor]


class DigitNet(nn.Module):
    """Two convolutions and a linear layer for 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of the ten digits for each image."""
        scores: torch.Tensor = self.layers(images)
        return scores


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test images, split in a fixed random order."""
    from sklearn.datasets import load_digits  # takes a second. Ranks that get the images as arguments need no import

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def check(losses: list[float]) -> None:
    """Fail on rank 2 in epoch 5."""
    if dist.get_rank() == 2 and len(losses) == 4:
        raise ArithmeticError(f"the gradients are not finite after {len(losses)} epochs")


def train(epochs: int, max_steps: int | None = None, *, crash: bool = False) -> Outcome:
    """Train in each rank. The process group exists already (backend="gloo")."""
    torch.manual_seed(1)
    training, test = digits()
    model = DistributedDataParallel(DigitNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    sampler = DistributedSampler(training, seed=2)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        batches = list(DataLoader(training, batch_size=32, sampler=sampler))[:max_steps]
        for step, (images, labels) in enumerate(batches, start=epoch * len(batches) + 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            mpwatch.report(step=step, total=epochs * len(batches), loss=loss.item())
        dist.all_reduce(total)
        losses.append(float(total) / len(batches) / dist.get_world_size())
        if crash:
            check(losses)
    return Outcome(losses, accuracy(model.module, test), model.module.state_dict())


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the fraction of images that are classified correctly."""
    images, labels = data.tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    crash = "--crash" in sys.argv
    result = mpwatch.run(train, 4, kwargs={"epochs": 12, "crash": crash}, backend="gloo", max_restarts=int(crash))
    for rank, outcome in result.items():
        print(f"rank {rank}: loss {outcome.losses[0]:.4f} -> {outcome.losses[-1]:.4f}, test accuracy {outcome.accuracy:.1%}")
