"""Programs that train on two nodes with trainers. The nodes are threads of the program."""

from functools import partial

from mpwatch import cluster


def run_on_threads(fn, nprocs, **options):
    """Do what `mpwatch.integrations.ray.run` does, with nodes that are threads of this process."""
    return cluster.run(cluster.ThreadEngine(), fn, nprocs, **options)


def fit():
    """Print what the caller's Trainer and module have after a training on two nodes of two ranks."""
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

    model = Mean()
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = watched(DDPStrategy(), run=partial(run_on_threads, node_timeout=60.0), grace_period=60)
    trainer = Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy=strategy, max_epochs=1, **off)
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(16, 1), batch_size=2))
    print(trainer.global_step, 0 < model.weight.item() < 1, float(trainer.callback_metrics["world_size"]))


def launch():
    """Print what the ranks of accelerate's launcher return."""
    from mpwatch.integrations.accelerate import notebook_launcher

    print(*notebook_launcher(find_place, num_processes=1, num_nodes=2, run=partial(run_on_threads, node_timeout=60.0)))


def find_place():
    from accelerate import Accelerator

    accelerator = Accelerator()
    return f"{accelerator.process_index} of {accelerator.num_processes}"
