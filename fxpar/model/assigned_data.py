"""Scripts that assign to `parameter.data`, as averages of weights do that take the place of the weights for a while."""

from __future__ import annotations

import functools

from torch import Tensor
from torch.distributed.tensor import DTensor

from fxpar._torch import dtensor_data
from fxpar.errors import ReplacedParameterError
from fxpar.model.contiguous_shards import placed_like
from fxpar.world.mesh import mesh_of_this_world


@functools.cache
def let_data_be_assigned() -> None:
    """From now on `parameter.data = value` gives a parameter of a distributed model the value, which it may share."""
    dtensor_data.let_data_be_assigned(_piece)


def _piece(held: DTensor, value: Tensor) -> Tensor | None:
    """This rank's piece of `value`, a DTensor or a whole tensor; None if `held` is of no distributed model.

    Raises:
        ReplacedParameterError: `value` has another shape or dtype.
    """
    mesh = mesh_of_this_world()
    if mesh is None or held.device_mesh != mesh.stage_mesh:
        return None
    if (value.shape, value.dtype) != (held.shape, held.dtype):
        raise ReplacedParameterError("the data of a parameter", *(f"{t.dtype} {tuple(t.shape)}" for t in (held, value)))
    return placed_like(value.detach(), held, mesh).to_local()
