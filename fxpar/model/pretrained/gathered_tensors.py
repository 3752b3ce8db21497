"""The whole tensors of a distributed model, gathered one at a time as they are read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxpar.model.distribution import Distribution
from fxpar.model.pretrained.lazy_tensor import Box, CopyPart, LazyTensor
from fxpar.model.pretrained.saved_tensors import saved_tensors
from fxpar.world.agreement import of_all_ranks
from fxpar.world.lost_peers import naming_lost_peers


def gathered_tensors(distribution: Distribution) -> tuple[dict[str, LazyTensor], dict[str, int]]:
    """All parameters and persistent buffers of the model, by their first names; and the pipe index that holds each.

    A collective of all ranks. Copying a tensor is a collective of the ranks of its pipe index, all of which must copy
    the same tensors in one order. The one that was gathered last is kept for the next copy.

    Raises:
        PeerLostError: another rank has ended; also where a tensor is copied.
    """
    held = {each.names[0]: each.held for each in saved_tensors(distribution) if each.held is not None}
    described = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    gathered = _Gathered(held)
    found: dict[str, LazyTensor] = {}
    pipe_of: dict[str, int] = {}
    for pipe, of_rank in of_all_ranks((distribution.mesh.coordinate["pipe"], described)):
        for name, (shape, dtype) in of_rank.items():
            if name not in found:
                like = torch.empty(shape, dtype=dtype, device="meta")
                found[name], pipe_of[name] = LazyTensor(like, gathered.copy(name), frozenset([name])), pipe
    return found, pipe_of


class _Gathered:
    """The whole tensor of one of the pieces `held`, in turn."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        self._held = held
        self._name = ""
        self._whole = torch.empty(0)

    def copy(self, name: str) -> CopyPart:
        """How a part of the tensor of that name is copied."""

        def copy_part(box: Box, target: Tensor) -> None:
            if name != self._name:
                self._whole = torch.empty(0)  # so that there are never two
                self._whole, self._name = self._gather(name), name
            target.copy_(self._whole[box])

        return copy_part

    def _gather(self, name: str) -> Tensor:
        tensor = self._held[name].detach()
        if not isinstance(tensor, DTensor):
            return tensor
        with naming_lost_peers(f"parameter {name}"):
            return tensor.full_tensor()
