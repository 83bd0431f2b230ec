"""A script without a `__main__` guard that trains and predicts with watched strategies of the standalone packages.

It runs in an empty folder.
"""

import os
import signal
import threading

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy as FabricDDP
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
    """Learns y = 3x + 2. Its first weights are random numbers of the process that makes it."""

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
    """Each rank has half of every weight, and a layer and a checkpoint callback that the caller does not have."""

    def configure_callbacks(self):
        return ModelCheckpoint(monitor="loss")

    def configure_model(self):
        self.more = torch.nn.Linear(1, 1)
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class Locked(Line):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Recorder(Callback):
    """Records the environment of its rank as its state. Kills rank 1 in the second epoch of the first attempt."""

    def __init__(self):
        self.record = {}

    def on_fit_start(self, trainer, module):
        self.record = {
            "parent": os.getppid(),
            "local_rank": os.environ["LOCAL_RANK"],
            "rank": mpwatch.current_worker().rank,
            "port": os.environ["MASTER_PORT"] == str(mpwatch.current_worker().master_port),
            "random": torch.rand(()).item(),
        }

    def on_train_epoch_start(self, trainer, module):
        me = mpwatch.current_worker()
        if (me.rank, me.restart_count, trainer.current_epoch) == (1, 0, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self):
        return self.record

    def load_state_dict(self, state):
        self.record = state


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


def fit_without_launcher():
    """Fit in a function that mpwatch.run calls. A watched strategy has no effect there."""
    module = model()
    trainer_in_rank = trainer(watched(DDPStrategy(), timeout=99))
    trainer_in_rank.fit(module, loader(shuffle=True))
    return weights(module), trainer_in_rank.world_size, trainer_in_rank.callback_metrics["loss"].item()


def in_fabric(fabric, factor, lazy, trainer):
    fabric.launch()  # has no effect in a rank
    lazy(torch.ones(1, 3))
    total = fabric.all_reduce(torch.tensor(factor * (fabric.global_rank + 1.0)), reduce_op="sum")
    return fabric.global_rank, total.item(), trainer, os.getppid()


# Ranks that are restarted from a checkpoint train the same weights as ranks that never failed

plain_weights, world_size, loss = mpwatch.run(fit_without_launcher, 2)[0]
assert world_size == 2
assert plain_weights != weights(model())
module = model()
random_number = torch.rand(()).item()
module = model().share_memory()  # like a model that ddp_spawn has trained. All ranks would write to it
recorder = Recorder()
events = []
fit_trainer = trainer(
    watched(DDPStrategy(), on_event=events.append, max_restarts=1),
    logger=CSVLogger("logs"),
    enable_checkpointing=True,
    enable_progress_bar=True,
    callbacks=[ModelCheckpoint("kept", monitor="loss", save_last=True), recorder],
)
fit_trainer.fit(module, loader(shuffle=True), ckpt_path="last")
assert events[-1].restarts == 1
assert weights(module) == plain_weights

# Ranks are children of the caller and have its random numbers

expected = {"parent": ME, "rank": 0, "local_rank": "0", "port": True, "random": random_number}
assert recorder.record == expected, recorder.record

# The caller's Trainer has the state of rank 0

state = fit_trainer.state
assert [state.fn, state.status, fit_trainer.current_epoch, fit_trainer.global_step] == ["fit", "finished", 3, 12]
for metrics in (fit_trainer.callback_metrics, fit_trainer.logged_metrics, fit_trainer.progress_bar_metrics):
    assert float(metrics["loss"]) == loss
checkpoints = fit_trainer.checkpoint_callback
assert os.path.isfile(checkpoints.best_model_path)
assert os.path.basename(checkpoints.last_model_path) == "last.ckpt"
assert checkpoints.best_model_score.item() == loss

# A Trainer predicts after fit, but fits only once

predictions = torch.cat(fit_trainer.predict(dataloaders=loader(), ckpt_path="best")).flatten().tolist()
assert predictions == pytest.approx(module.layer(DATA.tensors[0][::2]).flatten().tolist())
assert fit_trainer.callback_metrics | fit_trainer.logged_metrics == {}  # those of the last run
with pytest.raises(NotImplementedError, match=r"^this Trainer has fit a model already"):
    fit_trainer.fit(module, loader())

# Sharded weights come back whole

sharded = model(Sharded)
parallel = watched(ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
sharded_trainer = trainer(parallel, enable_checkpointing=True)
text = r"the caller's Sharded differs from .*: more\.weight, more\.bias; load them from a checkpoint$"
with pytest.warns(UserWarning, match=text):
    sharded_trainer.fit(sharded, loader(shuffle=True))
assert weights(sharded) == plain_weights
assert sharded_trainer.checkpoint_callback.dirpath == os.path.abspath("checkpoints")
assert os.path.isdir(sharded_trainer.checkpoint_callback.best_model_path)

# Fabric launches functions and nothing else

fabric = Fabric(accelerator="cpu", devices=2, strategy=watched(FabricDDP()))
values = fabric.launch(in_fabric, 10, torch.nn.LazyLinear(1), trainer="an argument of the function's own")
assert values == (0, 30.0, "an argument of the function's own", ME)
with pytest.raises(TypeError, match=r"^To spawn processes with the `DDPStrategy` strategy"):
    fabric.launch()

# Bad strategies and options raise at once

for call, error, text in (
    (lambda: watched("ddp"), TypeError, r"watched\(\) takes an instance of one of Lightning's strategies"),
    (
        lambda: watched(DDPStrategy(), backend="gloo"),
        TypeError,
        r"watched\(\) has no option 'backend'; its options are debug, ",
    ),
    (
        lambda: trainer(watched(DDPStrategy()), num_nodes=2),
        ValueError,
        r"watched\(\) starts ranks on one machine, but num_nodes=2",
    ),
    (
        lambda: trainer(watched(DDPStrategy())).fit(Locked(), loader()),
        mpwatch.LaunchError,
        r"args\[0\].lock is a _thread.lock, which cannot be sent to the ranks",
    ),
):
    with pytest.raises(error, match=f"^{text}"):
        call()

assert dict(BEFORE.items() ^ os.environ.items()) == {}
