"""A program: train a few steps and print the losses. It uses mpwatch, unless torchrun has started it."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

import mpwatch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from train_digits import train


def train_few_steps():
    return train(2, max_steps=3).losses


if "TORCHELASTIC_RUN_ID" in os.environ:
    dist.init_process_group("gloo")
    losses = train_few_steps()
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()
else:
    results = mpwatch.run(train_few_steps, 2, backend="gloo")
    assert all(losses == results[0] for losses in results)
    print(json.dumps(results[0]))
