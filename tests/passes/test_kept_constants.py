"""Of what a forward keeps on its modules, a rank computes for itself what depends on constants alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.passes.kept_constants import kept_constants
from tests.support.captures import captured


class Keeping(nn.Module):
    """Keeps what `make` returns for it and what it computed."""

    def __init__(self, make: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("average", torch.zeros(4))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.average += 1
        self.kept = self.make(self, x)
        return (x * self.kept).mean()


def _filled(model: Keeping, x: Tensor) -> Tensor:
    made = torch.zeros(4)
    made[1:].add_(model.table[1:])
    first, _ = made.chunk(2)
    first += 1
    return made


def _under_autocast(model: Keeping, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (model.table.expand(4, 4) @ model.table.unsqueeze(1)).flatten()


MADE = {
    "a constant": lambda model, x: torch.ones(x.shape[-1], dtype=x.dtype).cumsum(0),
    "of a buffer": lambda model, x: torch.outer(torch.arange(2.0), model.table[:2]).flatten().cos(),
    "in place": _filled,
    "under autocast": _under_autocast,
}


@pytest.mark.parametrize("name", MADE)
def test_it_is_what_the_forward_keeps(name: str) -> None:
    model = Keeping(MADE[name])
    expected = Keeping(MADE[name])
    x = torch.randn(2, 4)
    expected(x)
    capture, _ = captured(model, (x,))
    constants = kept_constants(capture)
    (found,), (again,) = constants().values(), constants().values()
    torch.testing.assert_close(found, expected.kept, rtol=0, atol=0)
    assert constants().keys() == capture.kept.keys()
    assert found is not again, "who changes one in place changes no other"


OTHERS = {
    "of the batch": lambda model, x: x.detach().mean(0),
    "of a parameter": lambda model, x: model.linear.weight[0].detach(),
    "of a buffer that changes": lambda model, x: model.average * 2,
    "random": lambda model, x: torch.rand(4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_a_constant(name: str) -> None:
    capture, _ = captured(Keeping(OTHERS[name]), (torch.randn(2, 4),))
    assert capture.kept and not kept_constants(capture)()
