"""Small programs, hints on their weights, and prices to lay them out under."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from fxpar.costs.prices import Prices
from fxpar.ir.hints import Spec
from tests.layouts.laid_out import prices

COLUMNS: Spec = ("x", None)
ROWS: Spec = (None, "x")
"""Hints on weights [out, in] of `nn.Linear`; those of transformers' `Conv1D` are [in, out]."""


def latency_counts() -> Prices:
    """Under which fewer collectives are better than small ones."""
    return prices(latency_us=5.0)


class Gated(nn.Module):
    """Two products of two matrices each, added up: where columns meet rows, both are partial sums."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a1, self.b1 = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.a2, self.b2 = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a2(self.a1(x)) + self.b2(self.b1(x))


class Residual(nn.Module):
    """A normalised MLP beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return x.square().sum()
