"""Train a small GPT by accelerate in several processes, or in one.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_by_accelerate.py

Losses are written to a file. With `--checkpoint`, the latter half of the training starts from what the first one saved.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from counting import LENGTH, VOCABULARY, make_rows
from gpt import GPT, Config
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import fxpar
from fxpar.integrations.accelerate import FxparAccelerator


def main() -> None:
    options = parse_options()
    model = make_model()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
        prepared = prepare(accelerator, model, options.batch)
    else:
        accelerator, batch = distribute(model, options)
        prepared = prepare(accelerator, model, batch)
    losses = list(train(accelerator, *prepared))
    if options.checkpoint:
        accelerator.save_state(options.checkpoint)
        list(train(accelerator, *prepared))
        accelerator.load_state(options.checkpoint)
    losses += train(accelerator, *prepared)
    accelerator.print(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    if accelerator.is_main_process:
        options.report.write_text(json.dumps(losses))
    accelerator.end_training()


def distribute(model: nn.Module, options: argparse.Namespace) -> tuple[FxparAccelerator, int]:
    """Distribute the model; returns an accelerator for the mesh, and the batch of each of its batch shards."""
    mesh = fxpar.init_mesh(pipe=options.pipe, data=options.data, x=options.x)
    batch = options.batch // fxpar.num_batch_shards(mesh)
    example = torch.zeros(batch, LENGTH, dtype=torch.long, device=mesh.device_type)
    fxpar.distribute(model, mesh, microbatches=2, example_inputs=(example, example.clone()))
    is_on_cpu = mesh.device_type == "cpu"
    compile_options = {"lowering": options.lowering}
    return FxparAccelerator(gradient_accumulation_steps=2, cpu=is_on_cpu, options=compile_options), batch


def prepare(accelerator: Accelerator, model: nn.Module, batch: int) -> tuple[Any, ...]:
    """Make and prepare what a training needs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return accelerator.prepare(model, optimizer, scheduler, DataLoader(make_rows(1), batch_size=batch, shuffle=True))


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    loader: DataLoader[tuple[Tensor, ...]],
) -> Iterator[float]:
    """An epoch; yields the loss of each batch."""
    for tokens, targets in loader:
        with accelerator.accumulate(model):
            loss = model(tokens, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        yield loss.item()


def make_model() -> GPT:
    """The model, always with the same initial weights."""
    torch.manual_seed(0)
    return GPT(Config(vocabulary=VOCABULARY, context=LENGTH, layers=2, heads=4, hidden=32))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--pipe", type=int, default=2, help="ranks of the pipeline")
    parser.add_argument("--data", type=int, default=1, help="parts of each batch")
    parser.add_argument("--x", type=int, default=2, help="parts of each matrix")
    parser.add_argument("--batch", type=int, default=8, help="rows in all parts of a batch")
    parser.add_argument("--lowering", default="inductor", help="inductor or aten")
    parser.add_argument("--checkpoint", help="a folder for what is saved half-way")
    parser.add_argument("--report", type=Path, default="losses.json", help="where the losses are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
