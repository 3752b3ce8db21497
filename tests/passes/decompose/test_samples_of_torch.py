"""Of PyTorch's own samples, those whose loss depends on how the batch is divided are warned of, or refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from fxpar.errors import BatchMixingWarning, FxparError, SumLossWarning
from fxpar.passes.decompose.batch_mixing import warn_of_batch_mixing
from fxpar.passes.settle_capture import settle_capture
from tests.support.captures import captured
from tests.support.halves import decomposed_stages
from tests.support.torch_samples import Sampled, models_of_modules, models_of_ops

ROUNDED = {"bfloat16", "half", "chalf", "matrix_exp"}
"""Ops whose samples differ by rounding alone: of few bits, or of numbers up to 1e12."""

SILENT = {
    # Places in all of the batch, as if it were flat, or rows of an index that is shorter than the batch
    *("take", "take_along_dim", "put", "scatter", "index_fill", "masked_scatter", "_segment_reduce_offsets"),
    *(f"scatter_reduce_{how}" for how in ("sum", "prod", "mean", "amax", "amin")),
    *("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"),
    # A batch of rows that is taken for one matrix
    *("diag", "diagflat", "diagonal_copy", "diagonal_scatter", "as_strided_scatter", "renorm", "linalg_cond"),
}
"""Ops without a rule that are taken to treat each sample by itself, since their results are as long as the batch."""


def is_mean_of_halves(model: Sampled) -> bool | None:
    """Whether the loss of the batch, and its gradient, are the means of those of its halves; None if there are none."""
    halves = [[tensor.chunk(2)[half] for tensor in model.batch] for half in range(2)]
    try:
        (whole, again), parts = ([_loss(model, model.batch) for _ in range(2)]), [_loss(model, half) for half in halves]
    except Exception:  # whatever PyTorch says of other sizes
        return None
    if not torch.equal(whole, again):
        return None  # random, or not a number
    return torch.allclose(torch.stack(parts).mean(0), whole, rtol=0, atol=1e-4 * whole.abs().max().item())


def _loss(model: Sampled, batch: Iterable[Tensor]) -> Tensor:
    """The loss, and its gradient by the first factor."""
    model = copy.deepcopy(model)
    loss = model(*batch)
    loss.backward()
    assert model.before.grad is not None
    return torch.stack([loss.detach(), model.before.grad])


def is_told(model: Sampled) -> bool:
    """Whether dividing the batch in two is warned of, or the model is refused."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            traced, distribution = captured(model, model.batch, microbatches=2)
            capture = settle_capture(traced, distribution)
            joints = decomposed_stages(capture)
            warn_of_batch_mixing(joints, capture, distribution)
        except (FxparError, torch._dynamo.exc.TorchDynamoException):
            return True
    return any(isinstance(each.message, BatchMixingWarning | SumLossWarning) for each in given)


@pytest.mark.parametrize("models", [models_of_ops, models_of_modules])
def test_what_depends_on_how_the_batch_is_divided_is_told(models: Callable[[], Iterable[tuple[str, Sampled]]]) -> None:
    divided: dict[str, Sampled] = {}  # of each op the first such sample
    for name, model in models():
        if name not in {*divided, *ROUNDED} and is_mean_of_halves(model) is False:
            divided[name] = model
    assert len(divided) > 20
    assert {name for name, model in divided.items() if not is_told(model)} <= SILENT
