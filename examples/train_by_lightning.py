"""Train a small GPT by the Trainer of Lightning in several processes, or in one.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_by_lightning.py

What was logged is written to out/metrics.csv, and what to resume from to the folder out/last.ckpt.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from counting import LENGTH, VOCABULARY, make_rows
from gpt import Block, Config
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from fxpar.integrations.lightning import FxparStrategy


class Counter(pl.LightningModule):
    """A language model that learns to count by strides. It knows nothing of fxpar."""

    def __init__(self) -> None:
        super().__init__()
        config = Config(vocabulary=VOCABULARY, context=LENGTH, layers=2, heads=4, hidden=32)
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.head = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, numbers: Tensor) -> Tensor:
        """numbers: (batch, length) of int64 -> (batch, length, vocabulary)."""
        return self.head(self.blocks(self.tokens(numbers)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._loss(batch, "val")

    def _loss(self, batch: list[Tensor], name: str) -> Tensor:
        numbers, targets = batch
        logits = self(numbers)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log(f"{name}_loss", loss)
        self.log_dict({f"{name}_accuracy": (logits.argmax(-1) == targets).float().mean()})
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    options = parse_options()
    pl.seed_everything(0)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy=make_strategy(options) if num_processes > 1 else "auto",
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        logger=CSVLogger(options.out, name="", version=""),
        callbacks=[ModelCheckpoint(options.out, save_last=True)],
        enable_progress_bar=False,
    )
    # The sampler is that which Lightning makes for several processes, so that one process reads rows in the same order.
    sampler = DistributedSampler(make_rows(1), num_replicas=1, rank=0) if num_processes == 1 else None
    train = DataLoader(make_rows(1), batch_size=options.batch // options.z, sampler=sampler)
    val = DataLoader(make_rows(2), batch_size=options.batch // options.z)
    trainer.fit(Counter(), train, val, ckpt_path=options.resume)


def make_strategy(options: argparse.Namespace) -> FxparStrategy:
    """The mesh, the parts of a batch, and how graphs become code."""
    compile_options = {"lowering": options.lowering}
    return FxparStrategy(pipe=options.pipe, z=options.z, x=options.x, microbatches=2, options=compile_options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--pipe", type=int, default=2, help="ranks of the pipeline")
    parser.add_argument("--z", type=int, default=1, help="parts of each batch")
    parser.add_argument("--x", type=int, default=2, help="parts of each matrix")
    parser.add_argument("--batch", type=int, default=8, help="rows in all parts of a batch")
    parser.add_argument("--epochs", type=int, default=2, help="how often all rows are read")
    parser.add_argument("--lowering", default="inductor", help="inductor or aten")
    parser.add_argument("--resume", help="the checkpoint to resume from")
    parser.add_argument("--out", type=Path, default="out", help="a folder for metrics and checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
