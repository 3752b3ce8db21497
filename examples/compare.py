"""What the training examples share: an ordinary training loop, and how its losses compare with those of one process."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import fxpar
from fxpar.hardware.machine import num_processors
from fxpar.schedule import SCHEDULE_NAMES

Batch = tuple[Tensor, ...]
"""The arguments of a model's forward; dim 0 of each is the batch."""


@dataclass(frozen=True, slots=True)
class Work:
    """The number of steps, and the number of training samples (`unit`: tokens or images) in each."""

    steps: int
    things: int
    unit: str


def train(
    step: Callable[..., Tensor],
    model: nn.Module,
    batches: Sequence[Batch],
    clip: Callable[..., Tensor],
    lr: float,
) -> Iterator[float]:
    """An ordinary training loop; yields the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in batches:
        loss = step(*batch)
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def train_alone(model: nn.Module, batches: Sequence[Batch], lr: float) -> Iterator[float]:
    """The same training without fxpar."""
    yield from train(model, model, batches, nn.utils.clip_grad_norm_, lr)


def part_of(batches: Sequence[Batch], mesh: fxpar.Mesh) -> list[Batch]:
    """This process's part of each batch, on its device."""
    parts, part = fxpar.num_batch_shards(mesh), fxpar.batch_rank(mesh)
    return [tuple(tensor.chunk(parts)[part].to(mesh.device_type) for tensor in batch) for batch in batches]


def compare(distributed: Iterable[float], alone: Iterable[float], mesh: fxpar.Mesh, work: Work, path: Path) -> None:
    """Run both trainings, write a comparison to `path`, and end all processes, with status 1 if anything is wrong.

    Args:
        distributed: the training on the mesh, which every process runs; yields losses.
        alone: the training on one process, which rank 0 runs when the other processes are done; yields losses.
    """
    problem = None
    losses, seconds = watch(distributed, f"{mesh.num_ranks} processes", work, visible=mesh.rank == 0)
    if mesh.rank == 0:
        torch.set_num_threads(num_processors())  # this process now has the machine to itself
        reference, _ = watch(alone, "without fxpar", work, visible=True)
        problem = report(losses, reference, seconds, work, path)
    dist.barrier()  # the other processes sleep here until rank 0 is done
    dist.destroy_process_group()
    sys.exit(problem)


def watch(training: Iterable[float], title: str, work: Work, *, visible: bool) -> tuple[list[float], list[float]]:
    """Run `training` with a progress bar; returns its losses, and the seconds of each step."""
    figures = TextColumn(f"loss {{task.fields[loss]:.3f}}, {{task.fields[rate]:,.0f}} {work.unit}/s")
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), figures)
    losses, seconds, start = [], [], time.perf_counter()
    with Progress(*columns, disable=not visible) as progress:
        task = progress.add_task(title, total=work.steps, loss=float("nan"), rate=0.0)
        for loss in training:
            losses.append(loss)
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            progress.update(task, advance=1, loss=loss, rate=work.things / seconds[-1])
    return losses, seconds


def report(losses: list[float], reference: list[float], seconds: list[float], work: Work, path: Path) -> str | None:
    """Print and write a comparison of the two runs; returns what is wrong, if anything is."""
    difference = max(abs(ours - theirs) for ours, theirs in zip(losses, reference, strict=True))
    figures = {
        "losses": losses,
        "reference_losses": reference,
        "max_loss_diff": difference,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        f"{work.unit}_per_s": work.things * len(seconds[1:]) / sum(seconds[1:]),
        "compile_s": seconds[0],  # distributing, compiling and the first step
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1))
    print(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}; the two curves differ by at most {difference:.1e}")
    if not difference <= 1e-3:
        return "the losses differ by more than 1e-3 from those of one process"
    return None if losses[-1] < losses[0] else "the loss did not fall"


def add_options(parser: argparse.ArgumentParser, *, batch: int, lr: float, report: str) -> None:
    """Add the options that all training examples have, with these defaults."""
    parser.add_argument("--microbatches", type=int, default=8, help="parts of a part of a batch, one after another")
    parser.add_argument("--schedule", default="eager-1f1b", help=f"{', '.join(SCHEDULE_NAMES)}, or a CSV file")
    parser.add_argument("--lowering", default="inductor", help="inductor or aten")
    parser.add_argument("--batch", type=int, default=batch, help="sequences or images per step")
    parser.add_argument("--steps", type=int, default=30, help="two or more")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate")
    parser.add_argument("--dump", help="folder for the graph after each pass")
    parser.add_argument("--report", type=Path, default=report, help="where the losses are written")
