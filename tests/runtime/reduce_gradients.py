"""What ranks do to reduce gradients; apart from the tests, so that they start without their libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from fxpar.errors import PeerLostError
from fxpar.ir.layout import Layout, Partial
from fxpar.lowering.cpu_collectives import sum_in_place
from fxpar.passes.bucket_collectives import BUCKET_BYTES
from fxpar.runtime.gradients import AxisReductions, Gradient, sums_of_partial, sums_over_batch
from fxpar.world.mesh import Mesh, init_mesh

PARTIAL_X = (("x", Partial()),)
LAYOUTS = {
    "partial": Layout((5,), PARTIAL_X),
    "reduced": Layout((2, 3)),
    "rows after columns": Layout((4, 3), PARTIAL_X),
    "double": Layout((2,), PARTIAL_X),
}


def gradients_of(rank: int) -> dict[str, Tensor]:
    """One rank's gradients before they are reduced; one of them lies column by column in memory."""
    generator = torch.Generator().manual_seed(rank)
    gradients = {name: torch.randn(layout.shape, generator=generator) for name, layout in LAYOUTS.items()}
    gradients["double"] = gradients["double"].double()
    gradients["rows after columns"] = gradients["rows after columns"].t().contiguous().t()
    return gradients


def reduce_all(sizes: dict[str, int]) -> dict[str, Tensor]:
    """Both reductions, in the order of the executor."""
    mesh = init_mesh(**sizes)
    gradients = gradients_of(mesh.rank)
    known = [Gradient.of(name, layout, gradients[name].dtype, mesh) for name, layout in LAYOUTS.items()]
    whole = AxisReductions(gradients, sums_of_partial(known, mesh), mesh).finish()
    return AxisReductions(whole, sums_over_batch(known, mesh), mesh).finish()


def sum_over_batch(gradients: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The sums of gradients that are replicated over all other axes."""
    known = [Gradient.of(name, Layout(each.shape), each.dtype, mesh) for name, each in gradients.items()]
    return AxisReductions(gradients, sums_over_batch(known, mesh), mesh).finish()


def messages_for(sizes_mb: list[int]) -> tuple[list[int], bool]:
    """How many bytes each message has that reduces float32 gradients of these sizes, and whether the sums are right."""
    mesh = init_mesh(data=2)
    gradients = {str(i): torch.ones(size * 2**18) for i, size in enumerate(sizes_mb)}
    sent: list[int] = []
    with patch("fxpar.runtime.gradients.sum_in_place", _counting(sent)):
        gradients = sum_over_batch(gradients, mesh)
    assert max(sent) <= BUCKET_BYTES
    return sent, all(bool((gradient == 2).all()) for gradient in gradients.values())


def _counting(sent: list[int]) -> Callable[[Tensor, str], Tensor]:
    def counted(value: Tensor, group_name: str) -> Tensor:
        sent.append(value.nbytes)
        return sum_in_place(value, group_name)

    return counted


def lose_a_rank() -> str:
    """Rank 1 ends after a reduction, while rank 0 begins another one; returns the latter's error."""
    mesh = init_mesh(data=2)
    sum_over_batch({"weight": torch.ones(3)}, mesh)
    if mesh.rank == 1:
        os._exit(1)
    try:
        sum_over_batch({"weight": torch.ones(3)}, mesh)
    except PeerLostError as error:
        return str(error)
    return "reduced"
