"""Programs that train with Lightning and start ranks with accelerate's launcher. Nodes are threads of the program."""

import json
from functools import partial

import mpwatch
from mpwatch import cluster


def run_on_threads(fn, nprocs, **options):
    """Do what `mpwatch.integrations.ray.run` does, with nodes that are threads of this process."""
    return cluster.run(cluster.ThreadEngine(), fn, nprocs, **options)


def fit_on_two_nodes():
    """Print what the caller's Trainer and module have after a training on two nodes of two ranks."""
    from trainers.mean import fit

    trainer, module = fit(1, num_nodes=2, run=partial(run_on_threads, node_timeout=60.0), grace_period=60)
    metrics = {name: float(trainer.callback_metrics[name]) for name in ("world_size", "node_rank")}
    print(json.dumps([trainer.global_step, 0 < module.weight.item() < 1, metrics]))


def launch_on_two_nodes():
    """Print what the ranks of accelerate's launcher return."""
    from mpwatch.integrations.accelerate import notebook_launcher

    print(*notebook_launcher(find_place, num_processes=1, num_nodes=2, run=partial(run_on_threads, node_timeout=60.0)))


def find_place():
    from accelerate import Accelerator

    accelerator = Accelerator()
    return f"{accelerator.process_index} of {accelerator.num_processes}"


def fit_until_stop(path):
    """Print the step at which all ranks have stopped, that of the checkpoint, and whether the Trainer knows of the stop."""
    import torch
    from lightning.pytorch import Callback

    from mpwatch.integrations.lightning.stop_callback import StopTogether
    from trainers.mean import fit

    class Request(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_rank == 1 and trainer.global_step == 3:
                mpwatch.request_stop()

    trainer, _ = fit(1000, [StopTogether(path), Request()])
    saved = torch.load(path, weights_only=False)
    print(json.dumps([trainer.global_step, saved["global_step"], trainer.should_stop]))
