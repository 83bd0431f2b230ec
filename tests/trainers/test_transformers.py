"""Tests of the Trainer of transformers in ranks of mpwatch. It needs no configuration."""

import pytest
import torch

import mpwatch

TINY = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


def train(folder):
    """Train a tiny model for a few steps on random tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    tokens = torch.randint(0, 32, (24, 8))
    model = GPT2LMHeadModel(GPT2Config(**TINY))
    before = torch.cat([weights.detach().flatten() for weights in model.parameters()])
    seen = []

    def collate(rows):
        seen.extend(tuple(row["input_ids"].tolist()) for row in rows)
        batch = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": batch, "labels": batch}

    arguments = TrainingArguments(
        folder,
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=0.1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, collate, [{"input_ids": row} for row in tokens])
    trainer.train()
    after = torch.cat([weights.detach().flatten() for weights in model.parameters()])
    return {
        "world size": arguments.world_size,
        "mode": arguments.parallel_mode.name,
        "device": arguments.device.type,
        "seen": set(seen),
        "moved": float((after - before).abs().max()),
        "weights": after,
    }


@pytest.mark.slow
def test_all_ranks_train_one_model(tmp_path):
    first, second = mpwatch.run(train, 2, args=(str(tmp_path),))
    for rank in (first, second):
        assert (rank["world size"], rank["mode"], rank["device"]) == (2, "DISTRIBUTED", "cpu")
        assert rank["moved"] > 0.01
    assert first["weights"].equal(second["weights"])
    assert first["seen"].isdisjoint(second["seen"])
    assert len(first["seen"] | second["seen"]) == 24  # each rank has half of the rows: three steps of four rows
