"""Train a byte-level GPT in several processes, then check every loss against one process.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py

The text is the source of Python's standard library. Unless options say otherwise, two processes or more make a pipeline
of two stages, each split over half of them.
"""

import argparse
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from compare import Batch, Work, add_options, compare, part_of, train, train_alone
from gpt import GPT, Config

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
    work = Work(options.steps, options.batch * config.context, "tokens")
    distributed = train_on_mesh(mesh, make_model(config), part_of(batches, mesh), options)
    alone = train_alone(make_model(config), batches, options.lr)
    compare(distributed, alone, mesh, work, options.report)


def make_model(config: Config) -> GPT:
    """The model, always with the same initial weights."""
    torch.manual_seed(0)
    return GPT(config)


def train_on_mesh(
    mesh: fxpar.Mesh, model: GPT, batches: Sequence[Batch], options: argparse.Namespace
) -> Iterator[float]:
    """Distribute and compile the model, and train it."""
    fxpar.distribute(
        model,
        mesh,
        layouts=HINTS,
        microbatches=options.microbatches,
        schedule=options.schedule,
        example_inputs=batches[0],
    )
    step = torch.compile(model, backend="fxpar", options={"dump": options.dump, "lowering": options.lowering})
    yield from train(step, model, batches, fxpar.clip_grad_norm_, options.lr)


def make_batches(steps: int, batch: int, context: int) -> list[Batch]:
    """For every step, random windows of the text, and the bytes that follow each one: two (batch, context) tensors."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    starts = torch.randint(len(text) - context, (steps, batch, 1), generator=torch.Generator().manual_seed(0))
    windows = text[starts + torch.arange(context + 1)].long()
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def parse_options() -> argparse.Namespace:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    pipe = min(2, processes)
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--pipe", type=int, default=pipe, help="ranks of the pipeline")
    parser.add_argument("--data", type=int, default=1, help="parts of each batch")
    parser.add_argument("--x", type=int, default=processes // pipe, help="parts of each matrix")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=320, help="size of a token's vector")
    add_options(parser, batch=16, lr=5e-4, report="dump/demo.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
