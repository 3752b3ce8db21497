"""A head: what families of models have it, how a tiny one is made, and with what its forward is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

ROWS = 8
"""Of a batch: two microbatches on meshes of up to four shards of the batch."""

Batch: TypeAlias = Mapping[str, Any]
"""Tensors with ROWS rows, also in containers; what else there is, such as tensors of another first dim, rows share."""


@dataclass(frozen=True, slots=True)
class Head:
    """Models of many families with the same kind of output.

    names: lists the families.
    builds: functions that make a model of a family, with random weights, smallest first: the first that has a loss and
        gradients counts. A forward returns something with an item "loss".
    batches: arguments by which the forward of a model may be called, most likely first; the first that it takes counts.
    """

    names: Callable[[], Iterable[str]]
    builds: Callable[[str], Iterable[Callable[[], nn.Module]]]
    batches: Callable[[nn.Module], Iterable[Batch]]


def chunk(batch: Batch, count: int) -> list[Batch]:
    """`count` parts of a batch, each with its share of the rows, and with all that is the same for all rows."""
    leaves, structure = pytree.tree_flatten(batch)
    parts = zip(*(leaf.chunk(count) if _has_rows(leaf) else [leaf] * count for leaf in leaves), strict=True)
    return [pytree.tree_unflatten(part, structure) for part in parts]


def cast_floats(batch: Batch, dtype: torch.dtype) -> Batch:
    """A batch whose real numbers are of `dtype`."""
    cast: Batch = pytree.tree_map(lambda leaf: leaf.to(dtype) if _is_real(leaf) else leaf, batch)
    return cast


class WithLoss(nn.Module):
    """A model without a loss, with one: how far all that it returns is from ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Any) -> dict[str, Tensor]:
        """The loss of what the model returns for these arguments."""
        returned = [each for each in pytree.tree_leaves(self.model(**arguments)) if _is_real(each)]
        return {"loss": torch.stack([(each - 1).square().mean() for each in returned]).sum()}


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == ROWS


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
