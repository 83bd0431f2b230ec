"""Quick tests of Lightning's Trainer with a watched strategy. See also test_lightning_results.py and test_lightning_failures.py."""

from types import SimpleNamespace

import pytest

from mpwatch.integrations.lightning.trainer_state import TrainerState
from notebooks.kernels import Kernel

CELL = """
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from mpwatch.integrations.lightning import watched

class Mean(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
    def training_step(self, batch):
        return (self.weight - batch.mean()).square()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

model = Mean()
before = model.weight.item()
off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = Trainer(accelerator="cpu", devices=2, strategy=watched(DDPStrategy()), max_epochs=1, **off)
trainer.fit(model, torch.utils.data.DataLoader(torch.ones(16, 1), batch_size=2))
after = model.weight.item()
"""


def test_a_module_that_cannot_take_over_its_weights_is_named_in_a_warning():
    class Unready:
        def load_state_dict(self, weights, strict):
            raise AttributeError("no layer before setup")

    trainer = SimpleNamespace(
        lightning_module=Unready(),
        fit_loop=SimpleNamespace(load_state_dict=print),
        checkpoint_callback=None,
        callbacks=[],
        callback_metrics={},
        logged_metrics={},
        progress_bar_metrics={},
    )
    state = TrainerState(
        value=None,
        state="finished",
        should_stop=True,
        metrics={"callback_metrics": {"loss": 0.5}},
        first_checkpoint_paths={},
        checkpoint_paths={},
        callback_states={},
        progress={},
        weights={"layer": 1},
        problems=[],
    )
    with pytest.warns(match="so some weights were not loaded: AttributeError: no layer before setup; load them"):
        state.restore(trainer)
    assert (trainer.state, trainer.callback_metrics) == ("finished", {"loss": 0.5})


@pytest.mark.slow
def test_a_trainer_in_a_notebook():
    kernel = Kernel()
    try:
        kernel.run(CELL)
        assert kernel.value("before < after < 1, trainer.global_step, trainer.state.finished") == (True, 4, True)
    finally:
        kernel.close()
