"""Random numbers by logical index: on any mesh, a piece draws the same numbers as that part of the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.core.philox import philox_uniform
from fxpar.ir.stage import Port, PortKind

RANDOM_STATE = Port(PortKind.INPUT, "random")
"""A (1, 3) row of int64 per microbatch: seed, step, and the number of the microbatch in the global batch."""


@torch.library.custom_op("fxpar::streams", mutates_args=())
def streams(state: Tensor, numbers: list[int]) -> list[Tensor]:
    """For each of `numbers`, the state with that stream number appended, (1, 4), from which `fxpar::uniform` draws.

    So a random op is the same in every layer, and equal layers can share compiled code.
    """
    # `new_full` instead of a tensor from a list, which would be copied from the host to a GPU.
    return [torch.cat([state, state.new_full((1, 1), number)], 1) for number in numbers]


@streams.register_fake
def _streams_fake(state: Tensor, numbers: list[int]) -> list[Tensor]:
    return [state.new_empty(1, 4) for _ in numbers]


@torch.library.custom_op("fxpar::uniform", mutates_args=())
def uniform(stream: Tensor, shape: list[int], sizes: list[int], strides: list[int], offset: int, span: int) -> Tensor:
    """Uniform numbers in [0, 1) of `shape` (float32): those of a strided box of a logical tensor of `span` elements.

    The global tensor has one logical tensor after another, one per microbatch, as along a leading batch dim.
    """
    seed, step, chunk, number = stream.reshape(-1).tolist()
    drawn = philox_uniform(sizes, strides, offset + chunk * span, seed=seed, step=step, op=number)
    return drawn.reshape(shape).to(stream.device)


@uniform.register_fake
def _uniform_fake(
    stream: Tensor, shape: list[int], sizes: list[int], strides: list[int], offset: int, span: int
) -> Tensor:
    return stream.new_empty(shape, dtype=torch.float32)


def random_state(seed: int, step: int, first: int, microbatches: int, device: torch.device | str = "cpu") -> Tensor:
    """The states of a step's microbatches, (microbatches, 3) of int64; `first` is the first one's global number."""
    # Filled on the device: a copy from the host would wait for all that the device has yet to do.
    states = torch.empty(microbatches, 3, dtype=torch.int64, device=device)
    states[:, 0].fill_(seed)
    states[:, 1].fill_(step)
    torch.arange(first, first + microbatches, device=device, out=states[:, 2])
    return states
