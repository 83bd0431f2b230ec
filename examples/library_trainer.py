"""mpwatch inside a library: the `fit()` of a trainer launches ranks, and returns the weights or raises a rank's error.

For its caller `fit()` is an ordinary method. It needs no launcher, no `__main__` guard and no script of its own.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpwatch


class Trainer:
    """Fits a model to tensors on several ranks.

    Args:
        nprocs: number of ranks.
        epochs: passes over the data.
        on_epoch: called in each rank with the number of the epoch and the loss.
    """

    def __init__(self, nprocs: int = 2, epochs: int = 200, on_epoch: Callable[[int, float], None] | None = None) -> None:
        self.nprocs = nprocs
        self.epochs = epochs
        self.on_epoch = on_epoch

    def fit(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
        """Return the trained model. Raise the exception of a rank, as if this process had trained the model."""
        failure: BaseException | None = None
        try:
            result = mpwatch.run(self._train, self.nprocs, args=(model, x, y), backend="gloo")
        except mpwatch.RunFailedError as error:
            failure = error.__cause__ or error  # there is no cause if a rank was killed
        if failure is not None:
            raise failure  # here, and not in the `except` block, where it would get another cause or context
        model.load_state_dict(result[0])
        return model

    def _train(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for epoch in range(self.epochs):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(parallel(x[rank::world_size]), y[rank::world_size])
            loss.backward()
            optimizer.step()
            if self.on_epoch is not None:
                self.on_epoch(epoch, float(loss.detach()))
        return model.state_dict()


def stop_at_nan(epoch: int, loss: float) -> None:
    """Raise in the ranks: a callback of a user."""
    if loss != loss:
        raise ArithmeticError(f"the loss is not a number in epoch {epoch}")


if __name__ == "__main__":
    points = torch.linspace(-1, 1, 64).unsqueeze(1)
    fitted = Trainer().fit(nn.Linear(1, 1), points, 3 * points + 2)
    print("weight {:.3f}, bias {:.3f}".format(*(p.item() for p in fitted.parameters())))
    try:
        Trainer(on_epoch=stop_at_nan).fit(nn.Linear(1, 1), points, points / 0)
    except ArithmeticError as error:
        print(f"fit() raised {error!r}")
