"""The integer program on graphs small enough to weigh by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpar.costs.dataflow import Operation, Value, operations
from fxpar.costs.edge_prices import EdgePrices
from fxpar.costs.prices import Prices
from fxpar.ir.layout import REPLICATE, Partial, Placement, Shard
from fxpar.layouts.choose import Axis, choose
from fxpar.layouts.solved_axes import SolvedAxes
from fxpar.rules.rule import Strategy
from fxpar.world.mesh import Mesh
from tests.layouts.laid_out import decomposed, prices

ROWS, COLUMNS = Shard(0, 2), Shard(1, 2)


class TwoReaders(nn.Module):
    """A value with two readers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.neg()
        return y.sin(), y.cos()


@pytest.fixture(scope="module")
def program() -> list[Operation]:
    return operations(decomposed(TwoReaders(), torch.randn(64, 64), with_backward=False))


def unary(*placements: Placement) -> list[Strategy]:
    return [Strategy((p,), (p,), divides_work=isinstance(p, Shard)) for p in placements]


def picked(
    program: list[Operation],
    given: Placement,
    sin: list[Strategy],
    cos: list[Strategy],
    weighed: Prices,
    *,
    immovable: set[Value] | None = None,
    penalty_us: float | None = None,
) -> list[Strategy] | None:
    """The strategies of the two readers of a value that is given as `given`; results may have any layout."""
    free = [Strategy((p,), ()) for p in (REPLICATE, ROWS, COLUMNS)]
    strategies = {"neg": [Strategy((REPLICATE,), (given,))], "sin": sin, "cos": cos}
    at_border = [free if op.operands else [Strategy((), (REPLICATE,))] for op in program]
    of_each = [strategies.get(op.node.name, ports) for op, ports in zip(program, at_border, strict=True)]
    axis = Axis("x", 2, weighed, 1, SolvedAxes(), [1] * len(program), EdgePrices((), Mesh(x=2), weighed.network))
    chosen = choose(program, of_each, axis, immovable or set(), penalty_us=penalty_us)
    if chosen is None:
        return None
    names = [op.node.name for op in program]
    return [of_each[number][chosen[number]] for number in (names.index("sin"), names.index("cos"))]


def test_a_move_is_paid_once_for_all_readers(program: list[Operation]) -> None:
    """An exchange is cheaper than a gather, unless the other reader needs the gather anyway."""
    weighed = prices(latency_us=10.0, bytes_per_us=1e3)
    cos = [*unary(REPLICATE), Strategy((ROWS,), (ROWS,), divides_work=False)]
    assert picked(program, COLUMNS, unary(COLUMNS), cos, weighed) == [*unary(COLUMNS), cos[1]]
    assert picked(program, COLUMNS, unary(REPLICATE), cos, weighed) == [*unary(REPLICATE), cos[0]]


def test_a_slice_for_one_pointwise_op_costs_more_than_it_saves(program: list[Operation]) -> None:
    both = unary(REPLICATE, ROWS)
    assert picked(program, REPLICATE, both, both, prices()) == [*unary(REPLICATE), *unary(REPLICATE)]
    assert picked(program, ROWS, both, both, prices()) == [*unary(ROWS), *unary(ROWS)]


def test_nothing_becomes_partial_by_a_move(program: list[Operation]) -> None:
    assert picked(program, REPLICATE, unary(Partial()), unary(REPLICATE), prices()) is None
    assert picked(program, Partial(), unary(Partial()), unary(REPLICATE), prices()) is not None


def test_an_immovable_value_is_used_as_it_lies_or_at_a_penalty(program: list[Operation]) -> None:
    neg = next(Value(op.node) for op in program if op.node.name == "neg")
    free = unary(REPLICATE, ROWS)
    assert picked(program, ROWS, free, free, prices(), immovable={neg}) == [*unary(ROWS), *unary(ROWS)]
    assert picked(program, ROWS, unary(REPLICATE), free, prices(), immovable={neg}) is None
    with_penalty = picked(program, ROWS, unary(REPLICATE), free, prices(), immovable={neg}, penalty_us=1e6)
    assert with_penalty == [*unary(REPLICATE), *unary(ROWS)]
