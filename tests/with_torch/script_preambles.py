"""A program with the usual beginnings of training scripts. Its functions use them in a rank."""

import argparse
import functools
import logging
import random
import sys
import threading
from contextlib import nullcontext

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.backends import cudnn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import mpwatch

logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(sys.stderr)])
logger = logging.getLogger(__name__)

torch.set_float32_matmul_precision("high")
cudnn.benchmark = True

args = argparse.Namespace(lr=0.1, epochs=2)
config = {key: value for key, value in vars(args).items() if isinstance(value, int | float)}
device = torch.device("cpu")
dtype = torch.bfloat16
ctx = nullcontext() if device.type == "meta" else torch.amp.autocast(device_type=device.type, dtype=dtype)
scaler = torch.amp.GradScaler("cpu")
generator = torch.Generator().manual_seed(1)
model = nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
loader = DataLoader(TensorDataset(torch.ones(4, 2), torch.zeros(4, dtype=torch.long)), batch_size=2)
aten = torch.ops.aten
best_loss = float("inf")
lock = threading.Lock()  # used by no rank


def set_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    return torch.backends.cudnn.deterministic and torch.backends.mkldnn.enabled


@torch.no_grad()
def evaluate():
    return [F.cross_entropy(model(x), y).item() for x, y in loader]


@functools.cache
def cached():
    return args.lr


class Trainer:
    def __init__(self):
        self.logger = logging.getLogger("Trainer")

    def fit(self):
        global best_loss
        for x, y in tqdm(loader, disable=True):
            with ctx:
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            best_loss = min(best_loss, loss.item())
        self.logger.info("best loss %s", best_loss)
        return best_loss < float("inf")


trainer = Trainer()


def main():
    logger.info("started with %s", config)
    assert aten.add(torch.ones(1), torch.ones(1)) == 2
    assert set_seed(args.epochs)
    assert Trainer().fit()
    assert trainer.fit()
    assert len(evaluate()) == 2
    assert cached() == 0.1
    assert generator.initial_seed() == 1
    return dtype, device


if __name__ == "__main__":
    assert list(mpwatch.run(main, 1)) == [(dtype, device)]
    print("done")
