"""Check that what files hold is what a model needs, on every rank for the whole model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from fxpar.errors import MissingWeightsError, OtherArchitectureError, WeightMismatchError
from fxpar.model.pretrained.conversions import may_be_missing, may_be_unexpected
from fxpar.model.pretrained.lazy_tensor import LazyTensor
from fxpar.model.pretrained.saved_tensors import SavedTensor


def check_weights(
    found: Mapping[str, LazyTensor],
    saved: Sequence[SavedTensor],
    known: Collection[str],
    model: nn.Module,
    folder: Path,
    strict: bool,
) -> list[str]:
    """Check `found`, the tensors of the files by the names of the model; returns the names that have no place in it.

    Args:
        saved: what the model needs.
        known: all names of parameters and buffers; those that are not needed may be there.
        strict: whether all that the model needs must be there.

    Raises:
        OtherArchitectureError: most of `found` has no place in the model, and most of the model is not in `found`.
        MissingWeightsError: not all that is needed is there, but must be.
        WeightMismatchError: tensors have other shapes, or are quantized.
    """
    missing = [each.names[0] for each in saved if not any(name in found for name in each.names)]
    unexpected = [name for name in found if name not in known]
    if 2 * len(missing) > len(saved) and 2 * len(unexpected) > len(found):
        raise OtherArchitectureError(folder, type(model).__name__, missing, unexpected)
    needed = [name for name in missing if not may_be_missing(name, model)]
    if strict and needed:
        raise MissingWeightsError(folder, needed, len(saved))
    mismatches = list(_mismatches(found, saved))
    if mismatches:
        raise WeightMismatchError(folder, mismatches)
    return [name for name in unexpected if not may_be_unexpected(name, model)]


def _mismatches(found: Mapping[str, LazyTensor], saved: Sequence[SavedTensor]) -> Iterator[str]:
    for each in saved:
        for name in each.names:
            stored = found.get(name)
            if stored is not None and (stored.shape != each.like.shape or _is_quantized(stored, each.like)):
                yield f"{name} (expected {_described(each.like)}, found {_described(stored)})"


def _is_quantized(stored: Tensor, like: Tensor) -> bool:
    """Whether `stored` has numbers in place of those of `like` that make sense only with a scale, such as float8."""
    return (
        stored.dtype != like.dtype
        and like.is_floating_point()
        and not (stored.is_floating_point() and stored.itemsize > 1)
    )


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
