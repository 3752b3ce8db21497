"""Train a byte-level GPT in several processes, then check every loss against one process.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py

The text is the source of Python's standard library. Unless options say otherwise, two processes or more make a pipeline
of two stages, each split over half of them.
"""

import argparse
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Config
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import fxpar

HINTS = {
    "blocks.*.attention.qkv.weight": ("x", None),
    "blocks.*.attention.out.weight": (None, "x"),
    "blocks.*.mlp.fc.weight": ("x", None),
    "blocks.*.mlp.out.weight": (None, "x"),
}


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # the processes share the machine's cores
    mesh = fxpar.init_mesh(pipe=options.pipe, data=options.data, x=options.x)
    config = Config(layers=options.layers, hidden=options.hidden)
    batches = make_batches(options.steps, options.batch, config.context)
    problem = None
    title = f"{mesh.num_ranks} processes"
    losses, seconds = watch(train_on_mesh(mesh, config, batches, options), title, batches, mesh.rank == 0)
    if mesh.rank == 0:
        reference, _ = watch(train_alone(config, batches, options.lr), "without fxpar", batches, True)
        problem = report(losses, reference, seconds, batches[0][0].numel(), options.report)
    dist.barrier()  # the other processes sleep here until rank 0 is done
    dist.destroy_process_group()
    sys.exit(problem)


def train_on_mesh(
    mesh: fxpar.Mesh, config: Config, batches: list[tuple[Tensor, Tensor]], options: argparse.Namespace
) -> Iterator[float]:
    """Distribute and compile the model, and train it on this process's part of each batch."""
    parts, part = fxpar.num_batch_shards(mesh), fxpar.batch_rank(mesh)
    local_batches = [(tokens.chunk(parts)[part], targets.chunk(parts)[part]) for tokens, targets in batches]
    torch.manual_seed(0)
    model = GPT(config)
    fxpar.distribute(
        model,
        mesh,
        layouts=HINTS,
        microbatches=options.microbatches,
        schedule=options.schedule,
        example_inputs=local_batches[0],
    )
    step = torch.compile(model, backend="fxpar", options={"dump": options.dump, "lowering": options.lowering})
    yield from train(step, model, local_batches, fxpar.clip_grad_norm_, options.lr)


def train_alone(config: Config, batches: list[tuple[Tensor, Tensor]], lr: float) -> Iterator[float]:
    """The same training without fxpar: the same first weights, and the whole batches."""
    torch.manual_seed(0)
    model = GPT(config)
    yield from train(model, model, batches, nn.utils.clip_grad_norm_, lr)


def train(
    step: Callable[..., Tensor],
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    clip: Callable[..., Tensor],
    lr: float,
) -> Iterator[float]:
    """An ordinary training loop; gives the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for tokens, targets in batches:
        loss = step(tokens, targets)
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def make_batches(steps: int, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """For every step random windows of the text, and the bytes that follow: two tensors of (batch, context)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    starts = torch.randint(len(text) - context, (steps, batch, 1), generator=torch.Generator().manual_seed(0))
    windows = text[starts + torch.arange(context + 1)].long()
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def watch(
    training: Iterable[float], title: str, batches: list[tuple[Tensor, Tensor]], visible: bool
) -> tuple[list[float], list[float]]:
    """Run `training` behind a progress bar; gives its losses, and the seconds that each step took."""
    figures = TextColumn("loss {task.fields[loss]:.3f}, {task.fields[rate]:,.0f} tokens/s")
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), figures)
    losses, seconds, start = [], [], time.perf_counter()
    with Progress(*columns, disable=not visible) as progress:
        task = progress.add_task(title, total=len(batches), loss=float("nan"), rate=0.0)
        for loss in training:
            losses.append(loss)
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            progress.update(task, advance=1, loss=loss, rate=batches[0][0].numel() / seconds[-1])
    return losses, seconds


def report(losses: list[float], reference: list[float], seconds: list[float], tokens: int, path: Path) -> str | None:
    """Print and write how the two runs compare; gives what is wrong, if anything is."""
    difference = max(abs(ours - theirs) for ours, theirs in zip(losses, reference, strict=True))
    figures = {
        "losses": losses,
        "reference_losses": reference,
        "max_loss_diff": difference,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "tokens_per_s": tokens * len(seconds[1:]) / sum(seconds[1:]),
        "compile_s": seconds[0],  # distributing, compiling and the first step
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1))
    print(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}; the two curves differ by at most {difference:.1e}")
    if not difference <= 1e-3:
        return "the losses differ by more than 1e-3 from those of one process"
    return None if losses[-1] < losses[0] else "the loss did not fall"


def parse_options() -> argparse.Namespace:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    pipe = min(2, processes)
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--pipe", type=int, default=pipe, help="stages of the pipeline")
    parser.add_argument("--data", type=int, default=1, help="parts of each batch")
    parser.add_argument("--x", type=int, default=processes // pipe, help="parts of each matrix")
    parser.add_argument("--microbatches", type=int, default=8, help="parts of a part of a batch, one after another")
    parser.add_argument("--schedule", default="eager-1f1b", help="gpipe, 1f1b or eager-1f1b")
    parser.add_argument("--lowering", default="inductor", help="inductor or aten")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=320, help="size of a token's vector")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--steps", type=int, default=30, help="two or more")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate")
    parser.add_argument("--dump", help="folder for the graph after each pass")
    parser.add_argument("--report", type=Path, default="dump/demo.json", help="where the losses are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
