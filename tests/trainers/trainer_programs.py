"""Programs that train with Lightning. A rank imports this module for the class of its model."""

from functools import partial

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

import mpwatch
from mpwatch import cluster
from mpwatch.integrations.lightning import watched

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Mean(LightningModule):
    """Learns the mean of its batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch):
        self.log("world_size", float(self.trainer.world_size), sync_dist=True)
        self.log("node_rank", float(self.trainer.node_rank), sync_dist=True, reduce_fx="sum")
        return (self.weight - batch.mean()).square()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(max_epochs, callbacks=(), num_nodes=1, **options):
    """Fit a Mean to ones on two ranks of each node, in steps of two. Return the Trainer and the Mean."""
    devices = {"accelerator": "cpu", "devices": 2, "num_nodes": num_nodes, "strategy": watched(DDPStrategy(), **options)}
    trainer, module = Trainer(max_epochs=max_epochs, callbacks=list(callbacks), **devices, **QUIET), Mean()
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(16, 1), batch_size=2))
    return trainer, module


def fit_on_two_nodes():
    """The nodes are threads of this process, as those of `mpwatch.integrations.ray.run` are processes of Ray."""
    run = partial(cluster.run, cluster.ThreadEngine(), node_timeout=60.0)
    trainer, module = fit(1, num_nodes=2, run=run, grace_period=60)
    assert (trainer.global_step, 0 < module.weight.item() < 1) == (2, True)
    assert {name: float(trainer.callback_metrics[name]) for name in ("world_size", "node_rank")} == {
        "world_size": 4.0,
        "node_rank": 2.0,
    }


def fit_until_stop(path):
    from mpwatch.integrations.lightning.stop_callback import StopTogether

    class Request(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_rank == 1 and trainer.global_step == 3:
                mpwatch.request_stop()

    trainer, _ = fit(1000, [StopTogether(path), Request()])
    assert 3 < trainer.global_step == torch.load(path, weights_only=False)["global_step"] < 4000
    assert trainer.should_stop
