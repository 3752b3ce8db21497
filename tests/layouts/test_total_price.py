"""The price of a whole choice: what its collectives, its work and its memory cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fxpar.costs.dataflow import operations
from fxpar.costs.edge_prices import EdgePrices
from fxpar.costs.equations import elements_sent
from fxpar.costs.prices import Prices
from fxpar.graph.redistribute import RedistributeKind
from fxpar.ir import node_meta
from fxpar.ir.stage import JointGraph
from fxpar.layouts.border_prices import BorderPrices
from fxpar.layouts.pins import Pins
from fxpar.layouts.search import Search
from fxpar.layouts.solved_axes import SolvedAxes
from fxpar.layouts.total_price import total_us
from fxpar.world.mesh import Mesh
from tests.layouts.laid_out import decomposed, lay_out, prices

SIZES = {"y": 2, "x": 2}
MOVES_ALONE = replace(prices(latency_us=3.0, flops_per_us=1e30), memory_bytes_per_us=1e30, stored_us_per_byte=0.0)
"""Nothing but collectives costs anything."""


def price_of(joint: JointGraph, solved: SolvedAxes | None, weighed: Prices) -> float:
    """The total price of a choice, or of what the search finds."""
    program, mesh = operations(joint), Mesh(**SIZES)
    edges = EdgePrices((), mesh, weighed.network)
    found = SolvedAxes.of(program, Search(program, {}, mesh, weighed, 1, edges).run()) if solved is None else solved
    border = BorderPrices(weighed, SIZES, 1, edges)
    return total_us(program, found, [1] * len(program), weighed, SIZES, border)


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
    return decomposed(model, torch.randn(256, 32))


def test_moves_cost_what_the_collectives_of_the_local_graph_cost(joint: JointGraph) -> None:
    laid = lay_out(joint, Pins(), MOVES_ALONE, **SIZES)
    expected = 0.0
    for c in laid.collectives:
        buffer = max(node_meta.tensor(node).nbytes for node in (c.node, c.node.all_input_nodes[0]))
        num_bytes = elements_sent(c.kind, buffer, SIZES[c.axis])
        expected += MOVES_ALONE.move_us(RedistributeKind[c.kind.upper()], c.axis, num_bytes, 0)
    assert len(laid.collectives) >= 5
    assert price_of(joint, None, MOVES_ALONE) == pytest.approx(expected)


def test_what_is_whole_everywhere_costs_work_and_storage(joint: JointGraph) -> None:
    """Nothing moves, so that the price is in proportion to that of memory."""
    stored = replace(MOVES_ALONE, stored_us_per_byte=2.0)
    weights = 3 * 32 * 64 + 64 + 32 + 64
    assert price_of(joint, SolvedAxes(), MOVES_ALONE) == pytest.approx(0.0)
    assert price_of(joint, SolvedAxes(), stored) == pytest.approx(2.0 * 4 * weights)


def test_what_the_backward_reads_of_the_forward_is_paid_once(joint: JointGraph) -> None:
    """Of each layer its input, and of each GELU its argument; the graph's own input is there anyway."""
    saved = replace(MOVES_ALONE, saved_us_per_byte=1.0)
    assert price_of(joint, SolvedAxes(), saved) == pytest.approx(4 * 256 * (2 * 64 + 2 * 32))
