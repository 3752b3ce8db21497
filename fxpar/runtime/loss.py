"""The loss of a step: the mean over microbatches and batch shards, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.transport.route_messages import complete
from fxpar.world.mesh import Mesh, num_batch_shards


@dataclass(frozen=True, slots=True)
class Loss:
    """Which of the results is the loss, and its dtype, which ranks that compute no part of it need as well.

    is_total: whether it is the sum of those of all parts of the batch, and not their mean; it then has no gradient.
    """

    position: int
    dtype: torch.dtype
    is_total: bool = False


@dataclass(frozen=True, slots=True)
class LossMean:
    """A mean whose all-reduce, from the last stage to all ranks, is in flight: `total`, to be returned in `dtype`."""

    total: Tensor
    dtype: torch.dtype
    work: dist.Work | None

    def value(self) -> Tensor:
        """Wait for the mean, and return it.

        Raises:
            PeerLostError: another rank has died.
        """
        if self.work is not None:
            complete(self.work, "the loss")
        return self.total.to(self.dtype)


def loss_weight(mesh: Mesh, microbatches: int) -> float:
    """The weight of one microbatch's loss of one batch shard in the mean."""
    return 1.0 / (microbatches * num_batch_shards(mesh))


def begin_mean(pieces: Sequence[Tensor], loss: Loss, mesh: Mesh, microbatches: int) -> LossMean:
    """Begin the sum over all ranks; `pieces` are this rank's losses by microbatch: none without the last stage."""
    # A sum of low precision would be rounded once for each microbatch and rank.
    total = torch.zeros((), dtype=torch.promote_types(loss.dtype, torch.float32), device=mesh.device_type)
    if pieces:
        copies = mesh.y * mesh.x  # these ranks hold copies of one loss
        weight = 1.0 if loss.is_total else loss_weight(mesh, microbatches)
        total += torch.stack(list(pieces)).to(total.dtype).sum() * (weight / copies)
    return LossMean(total, loss.dtype, dist.all_reduce(total, async_op=True) if mesh.num_ranks > 1 else None)
