"""Where samples are in results is found by the rules of ops; what they do not tell is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpar.ir.layout import Shard
from fxpar.ir.samples import Reduced, Samples
from fxpar.passes.find_result_samples import find_result_samples
from fxpar.passes.total_over_batch import total_over_batch
from fxpar.world.mesh import Mesh
from tests.support.captures import captured
from tests.support.halves import decomposed_stages

SAMPLES, LENGTH, WIDTH = 4, 3, 5


class Net(nn.Module):
    """A loss, and another result of values (samples, LENGTH, WIDTH)."""

    def __init__(self, result: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.result = nn.Linear(WIDTH, WIDTH), result

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        values = self.linear(x)
        return values.square().mean(), self.result(values, counts)


def samples_of(result: Callable[[Tensor, Tensor], Tensor], rows: int = SAMPLES) -> tuple[Samples | None, list[str]]:
    """Where samples are in the result, and the warnings; the batch is on two shards."""
    batch = torch.zeros(rows, LENGTH, WIDTH), torch.ones(rows, dtype=torch.int64)
    traced, distribution = captured(Net(result), batch, mesh=Mesh(data=2))
    capture = total_over_batch(traced, distribution)
    stages = decomposed_stages(capture)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = find_result_samples(stages, capture, distribution)
    return next(iter(found.values()), None), [str(warning.message) for warning in caught]


KNOWN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Samples | None]] = {
    "samples": (lambda v, n: v.exp(), Shard(0, SAMPLES)),
    "transposed": (lambda v, n: v.transpose(0, 2), Shard(2, SAMPLES)),
    "flat": (lambda v, n: v.flatten(0, 1), Shard(0, SAMPLES)),
    "flat behind others": (lambda v, n: v.transpose(0, 1).flatten(0, 1), Shard(0, SAMPLES, LENGTH)),
    "sum": (lambda v, n: v.sum(0), Reduced.SUM),
    "scaled sums": (lambda v, n: 2 * v.sum(0) - (v > 0).sum(0) * torch.ones(WIDTH), Reduced.SUM),
    "number": (lambda v, n: (v > 0).sum(), Reduced.SUM),
    "mean": (lambda v, n: v.mean((0, 1)), Reduced.MEAN),
    "shifted mean": (lambda v, n: 1 - v.mean(), Reduced.MEAN),
    "sum by number": (lambda v, n: v.sum() / n.sum(), Reduced.MEAN),
    "largest": (lambda v, n: v.amax((0, 1)), Reduced.MAX),
    "a parameter": (lambda v, n: torch.ones(SAMPLES) * 2 + n.new_zeros(()), Shard(0, SAMPLES)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_result_is_known_by_its_ops(name: str) -> None:
    result, samples = KNOWN[name]
    assert samples_of(result) == (samples, [])


UNKNOWN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "root of a mean": (lambda v, n: v.square().mean().sqrt(), "it is the mean over all microbatches"),
    "shifted sum": (lambda v, n: v.sum() + 1, "it is the mean over all microbatches"),
    "mean and sum": (lambda v, n: torch.stack([v.mean(), v.sum()]), "it is that of the last microbatch"),
    "products": (lambda v, n: v[:, 0] @ v[:, 0].t(), "its first dim, which is as long as a microbatch, is taken"),
}


def routed(v: Tensor, n: Tensor) -> Tensor:
    """As a mixture of experts computes tokens: in the order of their experts, from which they are put back."""
    tokens = v.flatten(0, 1)
    order = tokens[:, 0].argsort()
    return torch.zeros_like(tokens).index_add(0, order, tokens[order] * 2).view(v.shape)


def test_values_of_tokens_are_those_of_samples() -> None:
    assert samples_of(routed) == (Shard(0, SAMPLES), [])


def test_a_norm_over_the_batch_leaves_samples_where_they_are() -> None:
    found = samples_of(lambda v, n: F.batch_norm(v, None, None, training=True).transpose(0, 1))
    assert found == (Shard(1, SAMPLES), [])


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_result_that_is_not_of_the_whole_batch_is_warned_of(name: str) -> None:
    result, becomes = UNKNOWN[name]
    _, (text,) = samples_of(result)
    assert text.startswith("result 1 of the forward (torch.float32, shape (")
    assert f": {becomes}" in text


def test_a_batch_of_one_sample_is_told_from_other_dims_of_one_number() -> None:
    assert samples_of(lambda v, n: v.transpose(0, 1), rows=1) == (Shard(1, 2), [])
    assert samples_of(lambda v, n: v.transpose(0, 1)[None].flatten(1, 2), rows=1) == (Shard(1, 2, LENGTH), [])
    assert samples_of(lambda v, n: (v[..., 0] > 0).sum(), rows=1) == (Reduced.SUM, [])
