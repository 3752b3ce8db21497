"""A Trainer of transformers on rows of different lengths, which a collator pads to the longest of a batch shard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

import fxpar
from fxpar.integrations.transformers import FxparTrainer
from tests.support.run_under_launcher import set_launcher_environment
from tests.support.small_models import hf_llama

LENGTHS = (5, 3, 9, 4, 7, 7, 3, 5)


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randint(1, 96, (length,), generator=generator) for length in LENGTHS]
    return [{"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each} for each in numbers]


def collate(batch: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    fillers = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: pad_sequence([row[name] for row in batch], batch_first=True, padding_value=filler)
        for name, filler in fillers.items()
    }


def train(sizes: Mapping[str, int], rows_per_shard: int, folder: Path) -> list[dict[str, Any]]:
    """What was logged by one epoch; without sizes, by a plain Trainer. For `run_ranks`."""
    set_launcher_environment()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=rows_per_shard,
        per_device_eval_batch_size=rows_per_shard,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model, data = hf_llama(layers=1), {"train_dataset": rows(), "eval_dataset": rows(), "data_collator": collate}
    if not sizes:
        trainer = Trainer(model, arguments, **data)
    else:
        fxpar.distribute(model, fxpar.init_mesh(**sizes))
        trainer = FxparTrainer(model, arguments, **data, options={"lowering": "aten"})
    trainer.train()
    logged = {"loss", "grad_norm", "eval_loss"}
    history: list[dict[str, Any]] = json.loads(json.dumps(trainer.state.log_history))
    return [{key: entry[key] for key in entry.keys() & logged} for entry in history if "train_runtime" not in entry]
