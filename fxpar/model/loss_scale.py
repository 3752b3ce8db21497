"""The factor on the loss of steps in float16, whose gradients would underflow without it."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar._torch.amp import multiply_each, update_scale
from fxpar.ir.precision import Precision
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.mesh import Mesh

# Those of torch.amp.GradScaler.
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000


class LossScale:
    """A factor that halves after a step whose gradients overflowed, and doubles after many that did not.

    It is the same on all ranks. Everything stays on the device: the host does not wait for it.

    Args:
        initial: the factor at first.
    """

    def __init__(self, initial: float, mesh: Mesh) -> None:
        self._mesh = mesh
        self._factor = torch.full((), initial, device=mesh.device_type)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=mesh.device_type)

    @classmethod
    def of(cls, precision: Precision | None, mesh: Mesh) -> LossScale | None:
        """The one that `precision` asks for."""
        return None if precision is None or precision.loss_scale is None else cls(precision.loss_scale, mesh)

    def scaled(self, weight: Tensor) -> Tensor:
        """`weight` times the factor, in the dtype of `weight`."""
        return (weight * self._factor).to(weight.dtype)

    def unscale(self, gradients: Collection[Tensor]) -> None:
        """Divide the finished gradients of a step by the factor, in place, and adapt it. A collective of all ranks.

        If a gradient of any rank is infinite or NaN, all gradients of all ranks are afterwards: a rank alone could not
        know that the optimizer must not run.

        Raises:
            PeerLostError: another rank has ended.
        """
        overflow = torch.zeros((), device=self._factor.device)
        multiply_each(gradients, self._factor.reciprocal(), overflow)
        if self._mesh.num_ranks > 1:
            with naming_lost_peers("whether gradients overflowed"):
                dist.all_reduce(overflow, dist.ReduceOp.MAX)
        multiply_each(gradients, torch.where(overflow > 0, torch.nan, 1.0), torch.empty_like(overflow))
        update_scale(self._factor, self._good_steps, overflow, GROWTH, BACKOFF, GROWTH_INTERVAL)
