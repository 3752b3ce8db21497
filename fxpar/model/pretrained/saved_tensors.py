"""The tensors of a distributed model that files of weights hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar.model.buffers import persistent_buffers
from fxpar.model.distribution import Distribution
from fxpar.model.logical_parameters import names_of


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A parameter of the whole model, or a persistent buffer of this rank.

    names: all of its names; several if it is a tied parameter.
    like: a meta tensor of its shape and dtype in the whole model.
    held: what this rank holds of it, a DTensor of a parameter; None if it is on another stage.
    """

    names: tuple[str, ...]
    like: Tensor
    held: Tensor | None


def saved_tensors(distribution: Distribution) -> list[SavedTensor]:
    """All parameters of the model, in order, and then the buffers that this rank saves and loads."""
    own, model = distribution.own_parameters(), distribution.model
    found = []
    for fqn, names in names_of(distribution.parameters, model).items():
        parameter = distribution.parameters[fqn]
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        found.append(SavedTensor(tuple(names), like, own.get(fqn)))
    for name, buffer in persistent_buffers(model).items():
        found.append(SavedTensor((name,), torch.empty_like(buffer, device="meta"), buffer))
    return found


def known_tensors(saved: Iterable[SavedTensor], distribution: Distribution) -> dict[str, Tensor]:
    """A tensor of the shape of each parameter and each buffer of the whole model, by all of its names."""
    buffers = distribution.model.named_buffers(remove_duplicate=False)
    return dict(buffers) | {name: each.like for each in saved for name in each.names}
