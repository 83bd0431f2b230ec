"""The Trainer of transformers in ranks of mpwatch. It needs no configuration, and stops with a callback."""

import pytest
import torch

import mpwatch

pytestmark = pytest.mark.slow
TINY = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


def train(folder, max_steps, *, resume=False):
    """Train a tiny model on random tokens. Rank 1 requests a stop at step 3, which StopTogether carries out."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from mpwatch.integrations.transformers import StopTogether

    class Request(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3 and mpwatch.current_worker().rank == 1:
                mpwatch.request_stop()

    def collate(rows):
        seen.extend(tuple(row["input_ids"].tolist()) for row in rows)
        batch = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": batch, "labels": batch}

    torch.manual_seed(0)
    tokens, seen = torch.randint(0, 32, (24, 8)), []
    options = {"learning_rate": 0.1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(folder, max_steps=max_steps, per_device_train_batch_size=4, **options)
    model, rows = GPT2LMHeadModel(GPT2Config(**TINY)), [{"input_ids": row} for row in tokens]
    trainer = Trainer(model, arguments, collate, rows, callbacks=[StopTogether(), Request()])
    trainer.train(resume_from_checkpoint=resume or None)
    weights = torch.cat([weights.detach().flatten() for weights in model.parameters()])
    place = arguments.world_size, arguments.parallel_mode.name, arguments.device.type
    return {"step": trainer.state.global_step, "place": place, "seen": set(seen), "weights": weights}


def test_all_ranks_train_one_model(tmp_path):
    first, second = mpwatch.run(train, 2, args=(str(tmp_path), 3))
    assert first["place"] == second["place"] == (2, "DISTRIBUTED", "cpu")
    assert first["weights"].equal(second["weights"])
    assert first["seen"].isdisjoint(second["seen"])
    assert len(first["seen"] | second["seen"]) == 24  # each rank has half of the rows: three steps of four rows


def test_all_ranks_save_and_stop_and_go_on(tmp_path):
    stopped = mpwatch.run(train, 2, args=(str(tmp_path), 100))
    assert [rank["step"] for rank in stopped] == [stopped.stopped_at] * 2
    assert 3 < stopped.stopped_at < 100
    assert (tmp_path / f"checkpoint-{stopped.stopped_at}").is_dir()
    finished = mpwatch.run(train, 2, args=(str(tmp_path), 100), kwargs={"resume": True})
    assert [rank["step"] for rank in finished] == [100, 100]
    assert not finished[0]["weights"].equal(stopped[0]["weights"])
