"""PyTorch's own samples of its ops and modules, each between two layers of a model with a loss."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

BATCH = 8


class Sampled(nn.Module):
    """A function between two factors that are trained, and the mean of squares of what it returns, or the number.

    The tensors among its arguments that are as long as the first are the batch; others are kept.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.function, self.before, self.after = function, nn.Parameter(torch.tensor(1.1)), nn.Parameter(torch.ones(()))
        leaves, self.structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rows = next(leaves[i].shape[0] for i in tensors if leaves[i].dim() and len(leaves[i]))
        self.of_batch = [i for i in tensors if leaves[i].dim() and leaves[i].shape[0] == rows]
        self.scaled = next(i for i in tensors if leaves[i].is_floating_point() or leaves[i].is_complex())
        self.batch = [_lengthened(leaves[i]) for i in self.of_batch]
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def forward(self, *batch: Tensor) -> Tensor:
        leaves = list(self.leaves)
        for place, tensor in zip(self.of_batch, batch, strict=True):
            leaves[place] = tensor
        leaves[self.scaled] = leaves[self.scaled] * self.before
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        results = [each for each in pytree.tree_leaves(self.function(*args, **kwargs)) if _is_trained(each)]
        return self.after * torch.stack([_number(result) for result in results]).sum()


def _lengthened(tensor: Tensor) -> Tensor:
    """The rows again and again, each a little different where they are no integers."""
    rows = torch.cat([tensor.detach()] * -(-BATCH // len(tensor)))[:BATCH]
    return rows * (1 + 0.05 * torch.rand(rows.shape)) if rows.is_floating_point() else rows.clone()


def _is_trained(result: Any) -> bool:
    return isinstance(result, Tensor) and result.requires_grad


def _number(result: Tensor) -> Tensor:
    real = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
    return real.square().mean() if real.dim() else real


def models_of_ops() -> Iterator[tuple[str, Sampled]]:
    """Of every differentiable op the first sample and one of the others."""
    for info in common_methods_invocations.op_db:
        if info.supports_autograd and torch.float32 in info.supported_dtypes("cpu"):
            torch.manual_seed(0)
            found = _samples(info)
            for sample in found[:1] + found[len(found) // 2 : len(found) // 2 + 1]:
                yield from _model(info.formatted_name, info.op, (sample.input, *sample.args), sample.kwargs)


def _samples(info: Any) -> list[Any]:
    """Some samples of an op, of few sizes that batches can have; none where PyTorch has none of these."""
    sizes = patch.multiple(common_methods_invocations, S=4, M=8, L=8, XS=3)
    with sizes, warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore")
        return list(itertools.islice(info.sample_inputs_func(info, "cpu", torch.float32, False), 12))
    return []


def models_of_modules() -> Iterator[tuple[str, Sampled]]:
    """Of every module up to six samples."""
    for info in module_db:
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, "cpu", torch.float32, True, True)
        for sample in itertools.islice(inputs, 6):
            made, given = sample.constructor_input, sample.forward_input
            module = info.module_cls(*made.args, **made.kwargs)
            yield from _model(info.name, module, given.args, given.kwargs)


def _model(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Sampled]]:
    try:
        yield name, Sampled(function, args, kwargs)
    except (StopIteration, RuntimeError):
        return  # no tensor is a batch, none is trained, or one is sparse
