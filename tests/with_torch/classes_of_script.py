"""A program: ranks save objects with torch.save, and load data with classes of the script.

The ranks first run a function of the program, and then the whole program as a `Script`.
"""

import io
import os

import torch
from torch.utils.data import DataLoader, Dataset

import mpwatch

METHODS = ("fork", "spawn", "forkserver", None)


class Cfg:
    def __init__(self, lr):
        self.lr = lr

    class Inner:
        pass


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(i)


def collate(items):
    return torch.stack(items).sum()


def train(cfg):
    saved = io.BytesIO()
    torch.save({"cfg": cfg, "inner": Cfg.Inner()}, saved)
    sums = {}
    for method in METHODS:
        loader = DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context=method, collate_fn=collate)
        sums[method] = [int(batch) for batch in loader]
    return saved.getvalue(), sums


def check(saved, sums):
    back = torch.load(io.BytesIO(saved), weights_only=False)
    assert type(back["cfg"]) is Cfg
    assert back["cfg"].lr == 0.5
    assert type(back["inner"]) is Cfg.Inner
    assert sums == {method: [6, 22] for method in METHODS}


if __name__ == "__main__":
    if "RANK" in os.environ:
        check(*train(Cfg(0.5)))
    else:
        check(*mpwatch.run(train, 1, args=(Cfg(0.5),))[0])
        mpwatch.run(mpwatch.Script(__file__), 1)
    print("done")
