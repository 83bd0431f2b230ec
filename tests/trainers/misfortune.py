"""A training with Lightning in which rank 1 of 2 fails: `python misfortune.py LAUNCHER FAILURE`.

LAUNCHER: "ddp" and "ddp_spawn" are Lightning's own, "watched" is mpwatch's. FAILURE: "raises", "killed", "exits", or
"interrupted" (Ctrl-C in the caller). The program prints the time of the failure, and the time when fit() raised.
"""

import os
import signal
import sys
import time

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from trainer_programs import QUIET, Mean  # which is beside this script

import mpwatch
from mpwatch.integrations.lightning import watched

BUSY_SECONDS = 25  # rank 0 sleeps, so gloo cannot report the lost peer to it


class BadShardError(ValueError):
    def __init__(self, columns):
        super().__init__(f"shard 1 has {columns} columns, not 16")
        self.columns = columns


class ExplainingStrategy(DDPStrategy):
    """Explains an exception of a rank, as DDPStrategy does if parameters were not used."""

    def on_exception(self, exception):
        if isinstance(exception, BadShardError):
            exception.explanation = "explained by the strategy"


class FailingModel(Mean):
    """Its training fails in rank 1."""

    def __init__(self, failure):
        super().__init__()
        self.failure = failure

    def training_step(self, batch, index):
        if index == 2:
            if self.global_rank == 0:
                time.sleep(BUSY_SECONDS)
            print_time("failed")
            fail(self.failure)
        return super().training_step(batch)


def fail(failure):
    if failure == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif failure == "exits":
        os._exit(3)
    elif failure == "interrupted":
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()  # until it is stopped
    raise BadShardError(17)


def print_time(event):
    os.write(1, f"\n{event}={time.monotonic()}\n".encode())  # one write call, so the lines of two ranks do not mix


if __name__ == "__main__":  # Lightning's own launchers import this file
    launcher, failure = sys.argv[1:]
    strategy = watched(ExplainingStrategy()) if launcher == "watched" else launcher
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET)
    try:
        trainer.fit(FailingModel(failure), DataLoader(torch.ones(32, 4), batch_size=2))
    except mpwatch.RunFailedError as error:
        print_time("raised")
        print(error)
        if failure == "raises":
            cause = error.__cause__
            print("the exception itself:", type(cause) is BadShardError, cause.columns, cause.explanation)
        sys.exit(error.exit_code)
    except SystemExit:  # Lightning raises it after Ctrl-C
        print_time("raised")
        print("Ctrl-C works as before:", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        raise
