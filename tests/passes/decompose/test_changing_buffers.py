"""The loss that reads a buffer which the batch changes depends on how the batch is divided, and it is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.errors import ChangingBufferWarning
from fxpar.passes.decompose.batch_mixing import warn_of_batch_mixing
from tests.support.captures import captured
from tests.support.halves import decomposed_stages

ROWS, WIDTH = 8, 4


class Buffered(nn.Module):
    """`use` reads a buffer, and changes it, between two layers."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.use = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), use
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self, self.first(x))).square().mean()


def _codes(model: Buffered, x: Tensor) -> Tensor:
    y = x + model.average
    model.average.lerp_(x.detach().mean(0), 0.1)
    return y


def _watched(model: Buffered, x: Tensor) -> Tensor:
    model.average.lerp_(x.detach().mean(0), 0.1)
    return x


def _replaced(model: Buffered, x: Tensor) -> Tensor:
    model.average.copy_(x.detach()[0])
    return x


def _counted(model: Buffered, x: Tensor) -> Tensor:
    model.steps += 1
    return x * model.steps


def _warnings(use: Callable[[Any, Tensor], Tensor], boundaries: list[str], microbatches: int) -> list[str]:
    capture, distribution = captured(Buffered(use), (torch.randn(ROWS, WIDTH),), microbatches=microbatches)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        warn_of_batch_mixing(decomposed_stages(capture, boundaries), capture, distribution)
    return [str(each.message) for each in given if isinstance(each.message, ChangingBufferWarning)]


@pytest.mark.parametrize("boundaries", [[], ["last"]])
def test_a_loss_that_reads_what_microbatches_change_is_warned_of(boundaries: list[str]) -> None:
    (text,) = _warnings(_codes, boundaries, microbatches=2)
    assert "test_changing_buffers.py" in text and "2 microbatches on 1 shards" in text
    assert not _warnings(_codes, boundaries, microbatches=1)


@pytest.mark.parametrize("use", [_watched, _replaced, _counted, lambda model, x: model.norm(x)])
def test_nothing_else_is(use: Callable[[Any, Tensor], Tensor]) -> None:
    assert not _warnings(use, ["last"], microbatches=2)
