"""Random numbers by logical index: what a whole tensor draws, each of its pieces draws, on any mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.core.philox import philox_uniform
from fxpar.stage import Port, PortKind

RANDOM_STATE = Port(PortKind.INPUT, "random")
"""A (1, 3) row of int64 per microbatch: seed, step, and the number of the microbatch in the global batch."""


@torch.library.custom_op("fxpar::uniform", mutates_args=())
def uniform(
    state: Tensor, shape: list[int], sizes: list[int], strides: list[int], offset: int, span: int, stream: int
) -> Tensor:
    """Uniform numbers in [0, 1) of `shape` (float32): those of a strided box of a logical tensor of `span` elements.

    The global tensor has one logical tensor after another, one per microbatch, as along a leading batch dim.
    """
    seed, step, chunk = state.reshape(-1).tolist()
    drawn = philox_uniform(sizes, strides, offset + chunk * span, seed=seed, step=step, op=stream)
    return drawn.reshape(shape).to(state.device)


@uniform.register_fake
def _uniform_fake(
    state: Tensor, shape: list[int], sizes: list[int], strides: list[int], offset: int, span: int, stream: int
) -> Tensor:
    return state.new_empty(shape, dtype=torch.float32)


def random_state(seed: int, step: int, first: int, microbatches: int) -> Tensor:
    """The states of a step's microbatches, (microbatches, 3) of int64; `first` is the first one's global number."""
    return torch.tensor([[seed, step, first + microbatch] for microbatch in range(microbatches)])
