"""Which parameters are weights of products, and how they are wanted along one more axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.costs.dataflow import operations
from fxpar.ir.layout import REPLICATE, Layout, Shard
from fxpar.layouts.weights import Wanted, weights_of_products
from fxpar.rules.rule import Strategy
from tests.layouts.laid_out import decomposed


class Mixed(nn.Module):
    """A lookup, a cast weight, one that is only added, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.cast = nn.Parameter(torch.randn(8, 8))
        self.added = nn.Parameter(torch.randn(4, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens) + self.added)
        return functional.linear(x.half(), self.cast.half())


def test_weights_are_what_products_and_lookups_take_also_after_a_cast() -> None:
    program = operations(decomposed(Mixed(), torch.zeros(2, 4, dtype=torch.long), with_backward=False))
    names = {op.node: op.port.name for op in program if op.port is not None}
    assert {names[node] for node in weights_of_products(program)} == {"table.weight", "cast"}


ANY, ROWS, COLUMNS = (Strategy((), (placement,)) for placement in (REPLICATE, Shard(0, 2), Shard(1, 2)))


def test_a_weight_is_wanted_in_a_dim_of_its_own_else_in_shards_else_as_it_can_be_had() -> None:
    free, held = Layout((8, 8)), Layout((8, 8), (("x", Shard(0, 2)),))
    assert Wanted.OWN_DIM.among([ANY, ROWS, COLUMNS], free) == [ROWS, COLUMNS]
    assert Wanted.OWN_DIM.among([ANY, ROWS, COLUMNS], held) == [COLUMNS]
    assert Wanted.OWN_DIM.among([ANY, ROWS], held) == [ROWS], "no other dim can be sharded"
    assert Wanted.OWN_DIM.among([ANY], held) == [ANY], "none can"
    assert Wanted.SHARDED.among([ANY, ROWS, COLUMNS], held) == [ROWS, COLUMNS]
    assert Wanted.ANY.among([ANY, ROWS, COLUMNS], held) == [ANY, ROWS, COLUMNS]
