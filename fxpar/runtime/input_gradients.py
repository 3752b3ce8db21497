"""Join the gradients of a step's inputs from those of its microbatches and of the stages that read the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.runtime.microbatches import Microbatches
from fxpar.runtime.results import reduce_over_shards
from fxpar.world.lost_peers import naming_lost_peers
from fxpar.world.mesh import Mesh, num_batch_shards


class InputGradients:
    """Gradients of inputs, the same on all ranks of a batch shard.

    As under DistributedDataParallel, a rank gets the gradient of the loss of its own samples: what is computed from it
    has to be averaged over batch shards. Of an input that all samples share, it is that of the loss of the step.

    Args:
        names: of the inputs.
        split: how they are split into microbatches.
    """

    def __init__(self, names: Sequence[str], split: Microbatches, mesh: Mesh) -> None:
        self._names, self._split, self._mesh = names, split, mesh

    def join(
        self, terms: Mapping[tuple[str, int], Sequence[Tensor]], inputs: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, Tensor]:
        """The gradients by name; a collective of all ranks.

        Args:
            terms: by name and microbatch, those of this rank's stages.
            inputs: the pieces of each input, by microbatch.

        Raises:
            PeerLostError: another rank died.
        """
        return {
            name: self._join(name, [_sum(terms.get((name, i), ()), piece) for i, piece in enumerate(inputs[name])])
            for name in self._names
        }

    def _join(self, name: str, gradients: Sequence[Tensor]) -> Tensor:
        described = f"the gradient of input {name}"
        if name in self._split.batch_dims:
            joined = torch.cat(list(gradients), self._split.batch_dims[name]) * num_batch_shards(self._mesh)
        else:
            dtype = gradients[0].dtype
            total = torch.stack(list(gradients)).sum(0, dtype=torch.promote_types(dtype, torch.float32))
            joined = reduce_over_shards(total, dist.ReduceOp.SUM, described, self._mesh).to(dtype)
        if self._mesh.pipe > 1:
            joined = joined.contiguous()
            with naming_lost_peers(described):
                dist.all_reduce(joined, group=self._mesh.group("pipe"))
        return joined


def _sum(terms: Sequence[Tensor], like: Tensor) -> Tensor:
    return reduce(torch.add, terms) if terms else torch.zeros_like(like)
