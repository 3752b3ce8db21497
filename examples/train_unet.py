"""Train a U-Net to predict the noise in images, in several processes, then check every loss against one process.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_unet.py

The images are of random blobs. Unless options say otherwise, up to four processes make a pipeline of as many stages, or
of twice as many if these are interleaved. Skip connections go from early stages to late ones, past those in between.
"""

import argparse
import os
from collections.abc import Iterator, Sequence

import torch
from compare import Batch, Work, add_options, compare, part_of, train, train_alone
from torch import Tensor
from unet import Config, NoisePredictor

import fxpar

TIMES = 1000
"""The number of diffusion time steps, from almost no noise to pure noise."""


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # the processes share the machine's cores
    mesh = fxpar.init_mesh(pipe=options.pipe, data=options.data)
    config = Config(options.image, tuple(options.channels), options.layers)
    batches = make_batches(options.steps, options.batch, config.image)
    work = Work(options.steps, options.batch, "images")
    distributed = train_on_mesh(mesh, make_model(config), part_of(batches, mesh), options)
    alone = train_alone(make_model(config), batches, options.lr)
    compare(distributed, alone, mesh, work, options.report)


def make_model(config: Config) -> NoisePredictor:
    """The model, always with the same initial weights."""
    torch.manual_seed(0)
    return NoisePredictor(config)


def train_on_mesh(
    mesh: fxpar.Mesh, model: NoisePredictor, batches: Sequence[Batch], options: argparse.Namespace
) -> Iterator[float]:
    """Distribute and compile the model, and train it. Its stages are balanced: each has about the same work."""
    fxpar.distribute(
        model,
        mesh,
        microbatches=options.microbatches,
        schedule=options.schedule,
        example_inputs=batches[0],
    )
    step = torch.compile(model, backend="fxpar", options={"dump": options.dump, "lowering": options.lowering})
    yield from train(step, model, batches, fxpar.clip_grad_norm_, options.lr)


def make_batches(steps: int, batch: int, image: int) -> list[Batch]:
    """For every step, noisy images, their diffusion times, and the noise in them: the arguments of the model's forward.

    The share of noise grows with time as a sine (Nichol and Dhariwal, "Improved Denoising Diffusion Probabilistic
    Models", section 3.2).
    """
    random = torch.Generator().manual_seed(0)
    batches: list[Batch] = []
    for _ in range(steps):
        times = torch.randint(TIMES, (batch,), generator=random)
        noise = torch.randn(batch, 1, image, image, generator=random)
        angle = (times / TIMES * torch.pi / 2).view(-1, 1, 1, 1)
        batches.append((draw_blobs(batch, image, random) * angle.cos() + noise * angle.sin(), times, noise))
    return batches


def draw_blobs(batch: int, image: int, random: torch.Generator, blobs: int = 3) -> Tensor:
    """Images of a few smooth blobs on black: (batch, 1, image, image) from -1 to 1."""
    pixels = torch.linspace(-1, 1, image)
    y, x = torch.rand(2, batch, blobs, 1, 1, generator=random) * 2 - 1
    width = 0.1 + 0.3 * torch.rand(batch, blobs, 1, 1, generator=random)
    distance = (pixels.view(-1, 1) - y).square() + (pixels - x).square()
    brightness = torch.exp(-distance / width.square())
    return brightness.amax(1, keepdim=True) * 2 - 1


def parse_options() -> argparse.Namespace:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    pipe = min(4, processes)
    defaults = Config()
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--pipe", type=int, default=pipe, help="ranks of the pipeline")
    parser.add_argument("--data", type=int, default=processes // pipe, help="parts of each batch")
    parser.add_argument("--image", type=int, default=defaults.image, help="height and width in pixels")
    parser.add_argument("--channels", type=int, nargs="+", default=defaults.channels, help="of each level")
    parser.add_argument("--layers", type=int, default=defaults.layers, help="residual blocks per level")
    add_options(parser, batch=16, lr=1e-3, report="dump/unet.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
