"""Let a model begin with the same values on all ranks: those of rank 0, as DistributedDataParallel does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpar.model.distribution import Distribution, whole_parameters
from fxpar.progress.display import tell
from fxpar.progress.phases import as_phase
from fxpar.world.agreement import check_agreement, of_all_ranks, of_first_rank
from fxpar.world.checksum import fingerprint
from fxpar.world.lost_peers import naming_lost_peers


@as_phase
def take_values_of_first_rank(distribution: Distribution) -> None:
    """Let all tensors of a model have the values of rank 0; a collective of all ranks.

    Others have drawn other values if ranks are not seeded alike, or if a checkpoint was loaded on rank 0 alone. What is
    on the meta device has none yet.

    Raises:
        PlanMismatchError: names, shapes or dtypes of tensors differ from rank to rank, or whether they are on meta.
        PeerLostError: another rank has ended.
    """
    if distribution.mesh.num_ranks == 1:
        return
    held = _tensors(distribution)
    check_agreement({"the model's tensors": "\n".join(f"{name} {_kind(each)}" for name, each in held.items())})
    own = {name: fingerprint(each) for name, each in held.items() if not each.is_meta}
    first = of_first_rank(own)
    differing = of_all_ranks([name for name, found in own.items() if found != first[name]])
    taken = sorted(set(itertools.chain.from_iterable(differing)))
    for name in taken:
        _take(held[name], distribution.mesh.device_type)
    if taken:
        tell(
            f"{sum(map(bool, differing))} ranks have taken {len(taken)} of {len(held)} tensors of the model from rank 0"
        )


def _tensors(distribution: Distribution) -> dict[str, Tensor]:
    """Parameters, buffers, and tensors that are attributes of modules, in the order of their names.

    That in which modules have them may be that of a set. Sparse ones are left as they are.
    """
    found = (*whole_parameters(distribution).items(), *_other_tensors(distribution.model))
    return {name: each for name, each in sorted(found, key=itemgetter(0)) if each.layout == torch.strided}


def _other_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{attribute}".lstrip("."), value


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}{' on meta' if tensor.is_meta else ''}"


def _take(tensor: Tensor, device_type: str) -> None:
    """Give `tensor` the values that rank 0 has; they are sent as bytes, since backends lack some dtypes."""
    moved = tensor.detach().to(device_type, memory_format=torch.contiguous_format)
    with naming_lost_peers("the values that rank 0's model begins with"):
        dist.broadcast(moved.view(-1).view(torch.uint8), src=0)
    with torch.no_grad():
        tensor.copy_(moved)
