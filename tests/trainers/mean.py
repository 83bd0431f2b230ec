"""A module of Lightning that learns the mean of its batches, and a Trainer for it. For ranks and for programs."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from mpwatch.integrations.lightning import watched


class Mean(LightningModule):
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
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    devices = {"accelerator": "cpu", "devices": 2, "num_nodes": num_nodes, "strategy": watched(DDPStrategy(), **options)}
    trainer, module = Trainer(max_epochs=max_epochs, callbacks=list(callbacks), **devices, **off), Mean()
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(16, 1), batch_size=2))
    return trainer, module
