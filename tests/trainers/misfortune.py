"""A training with Lightning in which rank 1 of 2 comes to grief: `python misfortune.py LAUNCHER MISFORTUNE`.

LAUNCHER: "ddp" and "ddp_spawn" are Lightning's own, "watched" is ours. MISFORTUNE: "raises", "killed", "exits"; and
"interrupted": Ctrl-C, at the caller. It prints when that was, and when the caller of fit() was told.
"""

import os
import signal
import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import mpwatch
from mpwatch.integrations.lightning import watched

LONG = 25  # seconds that rank 0 does something else, and is not told by gloo


class BadShardError(ValueError):
    def __init__(self, columns):
        super().__init__(f"shard 1 has {columns} columns, not 16")
        self.columns = columns


class Doomed(LightningModule):
    """A linear model, and a rank 1 that does not see the end of it."""

    def __init__(self, misfortune):
        super().__init__()
        self.misfortune = misfortune
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        if index == 2:
            if self.global_rank == 0:
                time.sleep(LONG)
            stamp("misfortune")
            befall(self.misfortune)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def befall(misfortune):
    if misfortune == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif misfortune == "exits":
        os._exit(3)
    elif misfortune == "interrupted":
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()  # until it is told
    raise BadShardError(17)


def stamp(what):
    os.write(1, f"\n{what}={time.monotonic()}\n".encode())  # in one piece, whatever the other rank writes


if __name__ == "__main__":  # for Lightning's own
    launcher, misfortune = sys.argv[1:]
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=watched(DDPStrategy()) if launcher == "watched" else launcher,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Doomed(misfortune), DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=2))
    except mpwatch.RunFailedError as error:
        stamp("raised")
        print(error)
        if misfortune == "raises":
            print("the exception itself:", type(error.__cause__) is BadShardError, error.__cause__.columns)
        sys.exit(error.exit_code)
    except SystemExit:  # which is what Lightning makes of Ctrl-C
        stamp("raised")
        print("Ctrl-C works as before:", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        raise
