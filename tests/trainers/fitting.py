"""A script without a `__main__` guard that trains and predicts with watched strategies of the standalone packages.

It is run in an empty folder, and prints what came of it in a line of JSON, the last one.
"""

import copy
import json
import os
import signal
import threading
import warnings
from dataclasses import astuple, dataclass

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DataParallelStrategy
from lightning_fabric.strategies import DDPStrategy as FabricDDP
from lightning_fabric.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import mpwatch
from mpwatch.integrations.lightning import watched

DATA = TensorDataset(torch.linspace(-1, 1, 32).reshape(32, 1))
BEFORE = dict(os.environ)
ME = os.getpid()


class Line(LightningModule):
    """Learns y = 3x + 2; its first weights are random numbers of the process that makes it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        loss = (self.layer(batch[0]) - 3 * batch[0] - 2).square().mean()
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True, prog_bar=True)
        return loss

    def predict_step(self, batch):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sharded(Line):
    """Each rank has a half of every weight, and some that the caller does not know."""

    def configure_model(self):
        self.more = torch.nn.Linear(1, 1)
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class Locked(Line):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Witness(Callback):
    """Its state comes back to the caller's; and rank 1 is killed in the second epoch of its first life."""

    def __init__(self):
        self.seen = {}

    def on_fit_start(self, trainer, module):
        self.seen = {
            "parent": os.getppid(),
            "local_rank": os.environ["LOCAL_RANK"],
            "rank": mpwatch.current_worker().rank,
            "port": os.environ["MASTER_PORT"] == str(mpwatch.current_worker().master_port),
            "launcher": trainer.strategy.launcher,
            "random": torch.rand(()).item(),
        }

    def on_train_epoch_start(self, trainer, module):
        me = mpwatch.current_worker()
        if (me.rank, me.restart_count, trainer.current_epoch) == (1, 0, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.seen = state


def loader(**options):
    return DataLoader(DATA, batch_size=4, **options)


def trainer(strategy, **options):
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, **options}
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=3, enable_model_summary=False, **options)


def model(kind=Line):
    torch.manual_seed(5)
    return kind()


def weights(module):
    return {name: value.tolist() for name, value in module.state_dict().items()}


def plainly():
    """With nothing but mpwatch.run; a watched strategy does no harm there."""
    module = model()
    here = trainer(watched(DDPStrategy(), timeout=99))
    here.fit(module, loader(shuffle=True))
    return weights(module), here.world_size, here.callback_metrics["loss"].item()


@dataclass(frozen=True)
class Answer:
    rank: int
    total: float
    trainer: str
    parent: int


def in_fabric(fabric, factor, lazy, trainer):
    fabric.launch()  # of no effect here
    lazy(torch.ones(1, 3))
    total = fabric.all_reduce(torch.tensor(factor * (fabric.global_rank + 1.0)), reduce_op="sum")
    return Answer(fabric.global_rank, total.item(), trainer, os.getppid())


def refusal(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


told = {"me": ME, "first": weights(model())}

module = model()
told["random"] = torch.rand(()).item()
module = model().share_memory()  # as one that ddp_spawn has trained: ranks that shared it would all write to it
witness = Witness()
events = []
ours = trainer(
    watched(DDPStrategy(), on_event=events.append, max_restarts=1),
    logger=CSVLogger("logs"),
    enable_checkpointing=True,
    enable_progress_bar=True,
    callbacks=[ModelCheckpoint("kept", monitor="loss", save_last=True), witness],
)
ours.fit(module, loader(shuffle=True), ckpt_path="last")
told["fit"] = {
    "weights": weights(module),
    "witness": witness.seen,
    "state": [ours.state.fn, ours.state.status, ours.state.stage],
    "epochs": ours.current_epoch,
    "steps": ours.global_step,
    "metrics": [ours.callback_metrics["loss"].item(), ours.logged_metrics["loss"].item(), ours.progress_bar_metrics["loss"]],
    "best": os.path.isfile(ours.checkpoint_callback.best_model_path),
    "score": ours.checkpoint_callback.best_model_score.item(),
    "last": os.path.basename(ours.checkpoint_callback.last_model_path),
    "restarts": events[-1].restarts,
}
ours.save_checkpoint("by_the_caller.ckpt")
told["saved_steps"] = torch.load("by_the_caller.ckpt")["global_step"]
told["predictions"] = torch.cat(ours.predict(dataloaders=loader(), ckpt_path="best")).flatten().tolist()
told["metrics_after_predict"] = {**ours.callback_metrics, **ours.logged_metrics, **ours.progress_bar_metrics}
told["expected_predictions"] = module.layer(DATA.tensors[0][::2]).flatten().tolist()
told["fit_again"] = refusal(lambda: ours.fit(module, loader()))

early = trainer(watched(DDPStrategy()), logger=CSVLogger("early"), enable_checkpointing=True)
early.predict(model(), loader())
told["dirpath_before_fit"] = early.checkpoint_callback.dirpath

told["plain"] = mpwatch.run(plainly, 2)[0]

sharded = model(Sharded)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", UserWarning)
    parallel = watched(ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
    theirs = trainer(parallel, enable_checkpointing=True)
    theirs.fit(sharded, loader(shuffle=True))
told["sharded"] = weights(sharded)
told["checkpoint"] = [theirs.checkpoint_callback.dirpath, os.path.isdir(theirs.checkpoint_callback.best_model_path)]
told["warned"] = [str(warning.message) for warning in caught if "caller" in str(warning.message)]

fabric = Fabric(accelerator="cpu", devices=2, strategy=watched(FabricDDP()))
told["fabric"] = astuple(fabric.launch(in_fabric, 10, torch.nn.LazyLinear(1), trainer="an argument of the function's own"))
told["fabric_alone"] = refusal(fabric.launch)
told["is_spawning"] = isinstance(fabric.strategy.launcher, _MultiProcessingLauncher)

copied = copy.deepcopy(ours).strategy
told["copied"] = [copied.launcher is not ours.strategy.launcher, copied.launcher._strategy is copied]
told["refusals"] = {
    "name": refusal(lambda: watched("ddp")),
    "class": refusal(lambda: watched(DDPStrategy)),
    "one process": refusal(lambda: watched(DataParallelStrategy())),
    "used": refusal(lambda: watched(ours.strategy)),
    "option": refusal(lambda: watched(DDPStrategy(), backend="gloo")),
    "value": refusal(lambda: watched(DDPStrategy(), timeout=-1)),
    "scope": refusal(lambda: watched(DDPStrategy(), restart_policy=mpwatch.RestartPolicy(scope="worker"))),
    "logs": refusal(lambda: trainer(watched(DDPStrategy(), logs=mpwatch.LogSpec(show=2)))),
    "sending": refusal(lambda: trainer(watched(DDPStrategy())).fit(Locked(), loader())),
    "nodes": refusal(lambda: trainer(watched(DDPStrategy()), num_nodes=2)),
}

told["environment"] = dict(BEFORE.items() ^ os.environ.items())
print(json.dumps(told))
