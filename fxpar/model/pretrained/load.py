"""`load_pretrained`: fill a distributed model from safetensors, of which each rank reads what its shards need."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpar.ir.dtensor import layout_of
from fxpar.model.distribution import Distribution, distribution_of_model
from fxpar.model.pretrained.check_weights import check_weights
from fxpar.model.pretrained.conversions import as_in_model
from fxpar.model.pretrained.lazy_tensor import LazyTensor
from fxpar.model.pretrained.saved_tensors import known_tensors, saved_tensors
from fxpar.model.pretrained.stored_tensors import stored_tensors
from fxpar.world.agreement import failing_together


def load_pretrained(model: nn.Module, folder: str | PathLike[str], *, strict: bool = True) -> None:
    """Fill a distributed model from the safetensors in `folder`, in place. A collective of all ranks.

    Each rank reads the slices that its shards need. No rank holds a whole parameter, except one at a time of the few
    whose rows transformers permutes. Values are converted to the dtypes of the model.

    The folder has `model.safetensors`, or several files and `model.safetensors.index.json`, as `fxpar.save_pretrained`
    and the `save_pretrained` of transformers write them. A tied parameter may be there under any of its names. For a
    model of transformers, names and forms may be all that its `from_pretrained` takes: those of its base model, or one
    tensor for each expert.

    Args:
        model: what `fxpar.distribute` returned, or `torch.compile` of it.
        folder: is read by every rank: on a file system that all hosts share, or a copy on each of them.
        strict: whether all parameters and persistent buffers must be there. Otherwise, those that are missing keep the
            values that they have. Tensors without a place in the model are warned of in both cases.

    Raises:
        PlainModelError, MissingPackageError, WeightFilesError, OtherArchitectureError, MissingWeightsError,
        WeightMismatchError
        FailedOnOtherRankError: another rank raised one of these, or could not read a file.
        PeerLostError: another rank has ended.
    """
    distribution = distribution_of_model(model, "fxpar.load_pretrained")
    with failing_together(f"load the weights in {folder}"):
        unexpected = _load(distribution, Path(folder), strict)
    if unexpected and distribution.mesh.rank == 0:
        names = ", ".join(unexpected[:5])
        warnings.warn(f"{folder}: {len(unexpected)} tensors have no place in the model: {names}", stacklevel=2)


def _load(distribution: Distribution, folder: Path, strict: bool) -> list[str]:
    """Returns the names of tensors that have no place in the model."""
    model, saved = distribution.model, saved_tensors(distribution)
    known = known_tensors(saved, distribution)
    found = as_in_model(stored_tensors(folder), model, known)
    unexpected = check_weights(found, saved, known, model, folder, strict)
    for tensor in saved:
        sources = [found[name] for name in tensor.names if name in found]
        if tensor.held is not None and sources:
            _fill(tensor.held, sources[0], distribution.mesh.coordinate)
    return unexpected


@torch.no_grad()
def _fill(held: Tensor, source: LazyTensor, coordinate: Mapping[str, int]) -> None:
    """Copy to a tensor of this rank what it holds of `source`."""
    if not isinstance(held, DTensor):
        source.copy_whole(held)
        return
    local, layout = held.to_local(), layout_of(held)
    intervals = [_intervals(layout.ranges(dim, coordinate)) for dim in range(local.dim())]
    for box in itertools.product(*intervals):
        source.copy_part(tuple(there for _, there in box), local[tuple(here for here, _ in box)])


def _intervals(ranges: Sequence[tuple[int, int]]) -> list[tuple[slice, slice]]:
    """Each interval of a dim that this rank holds: where it is in the local tensor, and where in the whole one."""
    found, offset = [], 0
    for start, stop in ranges:
        if start < stop:
            found.append((slice(offset, offset + stop - start), slice(start, stop)))
        offset += stop - start
    return found
