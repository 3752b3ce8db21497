"""Train a small Llama by the Trainer of transformers in several processes, or in one.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_by_trainer.py --output_dir out

Takes all arguments of `transformers.TrainingArguments`, too. What was logged is written to out/trainer_state.json.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import (
    EvalPrediction,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

import fxpar
from fxpar.integrations.transformers import FxparTrainer

VOCABULARY, LENGTH, ROWS = 96, 16, 48


@dataclass
class MeshArguments:
    """The mesh of several processes, the parts of a batch, and how graphs become code."""

    pipe: int = 2
    z: int = 1
    x: int = 2
    microbatches: int = 2
    lowering: str = "inductor"


class Counting(Dataset):
    """Rows that count by random strides; the first numbers of each have no labels."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts, strides = torch.randint(VOCABULARY, (2, ROWS, 1), generator=generator)
        unlabelled = torch.randint(LENGTH // 2, (ROWS, 1), generator=generator)
        self.numbers = (starts + strides * torch.arange(LENGTH)) % VOCABULARY
        self.labels = self.numbers.masked_fill(torch.arange(LENGTH) < unlabelled, -100)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.numbers[row], "labels": self.labels[row]}


def make_model() -> LlamaForCausalLM:
    """A Llama of two layers, always with the same initial weights."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def accuracy(evaluated: EvalPrediction) -> dict[str, float]:
    """How many labels are the most likely number."""
    guesses, labels = evaluated.predictions[:, :-1].argmax(-1), evaluated.label_ids[:, 1:]
    return {"accuracy": float(numpy.mean(guesses[labels != -100] == labels[labels != -100]))}


def make_trainer(on: MeshArguments, args: TrainingArguments) -> Trainer:
    """A plain trainer in one process, and a distributed one in several."""
    model, data = make_model(), {"train_dataset": Counting(seed=1), "eval_dataset": Counting(seed=2)}
    if args.world_size == 1:
        return Trainer(model, args, **data, compute_metrics=accuracy)
    mesh = fxpar.init_mesh(pipe=on.pipe, z=on.z, x=on.x, device_type=args.device.type)
    rows = torch.zeros(args.train_batch_size, LENGTH, dtype=torch.long)
    inputs = {"input_ids": rows, "labels": rows.clone(), "num_items_in_batch": torch.ones(())}
    fxpar.distribute(model, mesh, microbatches=on.microbatches, example_inputs=inputs)
    return FxparTrainer(model, args, **data, compute_metrics=accuracy, options={"lowering": on.lowering})


def main() -> None:
    on, args = HfArgumentParser((MeshArguments, TrainingArguments)).parse_args_into_dataclasses()
    trainer = make_trainer(on, args)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_state()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
