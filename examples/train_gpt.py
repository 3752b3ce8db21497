"""Train a byte-level GPT in several processes, then check every loss against one process.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py

The text is the source of Python's standard library. By default two processes or more make a pipeline of two stages,
each of which is split over the processes that it gets; one process runs alone.
"""

import argparse
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Config
from rich.progress import Progress, TextColumn
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import fxpar

Batch = tuple[Tensor, Tensor]

HINTS = {
    "blocks.*.attention.qkv.weight": ("x", None),
    "blocks.*.attention.out.weight": (None, "x"),
    "blocks.*.mlp.fc.weight": ("x", None),
    "blocks.*.mlp.out.weight": (None, "x"),
}


def main() -> None:
    """Train on the mesh, then the same in one process, and write how they compare."""
    torch.set_num_threads(1)  # one thread per process, since they share the machine's cores
    options = parse_options()
    config = Config(layers=options.layers, hidden=options.hidden)
    batches = make_batches(options.steps, options.batch, config.context)
    mesh = fxpar.init_mesh(pipe=options.pipe, data=options.data, x=options.x)
    losses, seconds = watch(train_on_mesh(mesh, config, batches, options), str(mesh), batches, mesh.rank == 0)
    problem = None
    if mesh.rank == 0:
        reference, _ = watch(train_alone(config, batches, options), "one process", batches, True)
        problem = report(losses, reference, seconds, batches, options.report)
    dist.barrier()  # sleeps until rank 0 is done
    dist.destroy_process_group()
    sys.exit(problem)


def train_on_mesh(
    mesh: fxpar.Mesh, config: Config, batches: list[Batch], options: argparse.Namespace
) -> Iterator[float]:
    """Distribute the model, compile it, and yield the loss of each step; the first one compiles."""
    shards, shard = fxpar.num_batch_shards(mesh), fxpar.batch_rank(mesh)
    batches = [(tokens.chunk(shards)[shard], targets.chunk(shards)[shard]) for tokens, targets in batches]
    torch.manual_seed(options.seed)
    model = GPT(config)
    fxpar.distribute(
        model,
        mesh,
        layouts=HINTS,
        microbatches=options.microbatches,
        schedule=options.schedule,
        example_inputs=batches[0],
    )
    step = torch.compile(model, backend="fxpar", options={"dump": options.dump, "lowering": options.lowering})
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for tokens, targets in batches:
        loss = step(tokens, targets)
        loss.backward()
        fxpar.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def train_alone(config: Config, batches: list[Batch], options: argparse.Namespace) -> Iterator[float]:
    """The same in plain PyTorch: the same first weights, and the same batches."""
    torch.manual_seed(options.seed)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for tokens, targets in batches:
        loss = model(tokens, targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def make_batches(steps: int, batch: int, context: int) -> list[Batch]:
    """Random windows of Python's standard library; targets are the bytes that follow."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    starts = torch.randint(len(text) - context, (steps, batch, 1), generator=torch.Generator().manual_seed(0))
    windows = text[starts + torch.arange(context + 1)].long()
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def watch(
    training: Iterable[float], title: str, batches: list[Batch], visible: bool
) -> tuple[list[float], list[float]]:
    """Run `training` behind a progress bar; gives the losses, and the seconds that each step took."""
    figures = TextColumn("loss {task.fields[loss]:.4f}  {task.fields[tokens_per_s]:,.0f} tokens/s")
    losses, seconds = [], []
    with Progress(*Progress.get_default_columns(), figures, disable=not visible) as progress:
        task = progress.add_task(title, total=len(batches), loss=float("nan"), tokens_per_s=0.0)
        start = time.perf_counter()
        for loss in training:
            now = time.perf_counter()
            losses.append(loss)
            seconds.append(now - start)
            progress.update(task, advance=1, loss=loss, tokens_per_s=batches[0][0].numel() / seconds[-1])
            start = now
    return losses, seconds


def report(
    losses: list[float], reference: list[float], seconds: list[float], batches: list[Batch], path: Path
) -> str | None:
    """Print and write how the two runs compare; gives what is wrong, if anything is."""
    differences = [abs(ours - theirs) for ours, theirs in zip(losses, reference, strict=True)]
    figures: dict[str, Any] = {
        "losses": losses,
        "reference_losses": reference,
        "max_loss_diff": max(differences),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "tokens_per_s": batches[0][0].numel() * len(seconds[1:]) / sum(seconds[1:]),
        "compile_s": seconds[0],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"loss from {losses[0]:.4f} to {losses[-1]:.4f}; the two curves differ by at most {max(differences):.2e}")
    if not max(differences) <= 1e-3:
        return "the losses differ from one process's by more than 1e-3"
    return None if losses[-1] < losses[0] else "the loss did not fall"


def parse_options() -> argparse.Namespace:
    """Options whose defaults train the model of 10 million parameters for about a minute."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    pipe = min(2, processes)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pipe", type=int, default=pipe, help="pipeline stages")
    add("--data", type=int, default=1, help="copies of the model, each with a share of the batch")
    add("--x", type=int, default=processes // pipe, help="processes that split each matrix")
    add("--microbatches", type=int, default=8)
    add("--schedule", default="eager-1f1b", help="gpipe, 1f1b or eager-1f1b")
    add("--lowering", default="inductor", help="inductor or aten")
    add("--layers", type=int, default=Config().layers)
    add("--hidden", type=int, default=Config().hidden)
    add("--batch", type=int, default=16, help="sequences per step")
    add("--steps", type=int, default=30, help="at least 2, since the first one compiles")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--dump", help="directory for the graph after each pass")
    add("--report", type=Path, default=Path("dump/demo.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
