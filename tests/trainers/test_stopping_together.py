"""The callbacks that let a trainer save and stop on all ranks at the same step."""

import json

import pytest
import torch

import mpwatch
from support.programs import ENV, python

LIGHTNING_PROGRAM = """
import json, sys
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
import mpwatch
from mpwatch.integrations.lightning import watched
from mpwatch.integrations.lightning.stop_callback import StopTogether

class Mean(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
    def training_step(self, batch):
        return (self.weight - batch.mean()).square()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Request(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            mpwatch.request_stop()

path = sys.argv[1]
off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = Trainer(
    accelerator="cpu", devices=2, strategy=watched(DDPStrategy()), max_epochs=1000, callbacks=[StopTogether(path), Request()],
    **off,
)
trainer.fit(Mean(), torch.utils.data.DataLoader(torch.ones(16, 1), batch_size=2))
saved = torch.load(path, weights_only=False)
print(json.dumps([trainer.global_step, saved["global_step"], trainer.should_stop]))
"""


@pytest.mark.slow
def test_lightning_saves_and_stops(tmp_path):
    env = {**ENV, "PYTHONWARNINGS": "ignore"}  # Lightning uses what torch has deprecated
    done = python("-c", LIGHTNING_PROGRAM, str(tmp_path / "last.ckpt"), cwd=tmp_path, env=env)
    step, saved_step, was_stopped = json.loads(done.stdout.splitlines()[-1])
    assert 3 < step == saved_step < 4000
    assert was_stopped


def train(folder, *, resume):
    """Train until all ranks stop together. Rank 1 requests that at step 3."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from mpwatch.integrations.transformers import StopTogether

    class Request(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3 and mpwatch.current_worker().rank == 1:
                mpwatch.request_stop()

    torch.manual_seed(0)
    tokens = torch.randint(0, 32, (24, 8))
    sizes = {
        "vocab_size": 32,
        "n_positions": 8,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    arguments = TrainingArguments(
        folder, max_steps=400, per_device_train_batch_size=4, save_strategy="no", report_to=[], disable_tqdm=True
    )
    trainer = Trainer(
        GPT2LMHeadModel(GPT2Config(**sizes)),
        arguments,
        lambda rows: {name: torch.stack([row["input_ids"] for row in rows]) for name in ("input_ids", "labels")},
        [{"input_ids": row} for row in tokens],
        callbacks=[StopTogether(), Request()],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer.state.global_step


@pytest.mark.slow
def test_transformers_saves_and_stops_and_goes_on(tmp_path):
    stopped = mpwatch.run(train, 2, args=(str(tmp_path),), kwargs={"resume": False})
    assert list(stopped) == [stopped.stopped_at] * 2
    assert 3 < stopped.stopped_at < 400
    assert (tmp_path / f"checkpoint-{stopped.stopped_at}").is_dir()
    finished = mpwatch.run(train, 2, args=(str(tmp_path),), kwargs={"resume": True})
    assert list(finished) == [400, 400]
