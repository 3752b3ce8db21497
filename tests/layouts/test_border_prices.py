"""What enters and leaves a stage costs its storage, its transfer from or to other hosts, or the sum of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from fxpar.costs.dataflow import Border, Operation, Value
from fxpar.costs.edge_prices import EdgePrices
from fxpar.hardware.network import Network
from fxpar.ir.layout import Layout, Partial, Shard
from fxpar.ir.node_meta import set_value
from fxpar.ir.stage import Port, PortKind, StageBorder
from fxpar.layouts.border_prices import BorderPrices
from fxpar.world.mesh import Mesh
from tests.layouts.laid_out import prices

ROWS, WHOLE, SUMMED = Layout((64, 64), (("x", Shard(0, 2)),)), Layout((64, 64)), Layout((64, 64), (("x", Partial()),))
BYTES = 64 * 64 * 4
EDGE, PARAMETER = Port(PortKind.EDGE, "h"), Port(PortKind.PARAMETER, "w")
WEIGHED = replace(prices(), stored_us_per_byte=3.0, edge_bytes_per_us=2.0, network=Network(1.0, 1e-3))
"""A network of one byte per microsecond, and twice that into a rank."""


def us(border: Border, port: Port, layout: Layout, microbatches: int = 4) -> float:
    """The price at the second of two stages, each on two hosts; the first has its edge in rows."""
    mesh = replace(Mesh(pipe=2, x=2), hosts=(0, 1, 2, 3))
    edges = EdgePrices([StageBorder({}, {EDGE: ROWS}, {EDGE: ROWS}, {})], mesh, WEIGHED.network)
    value = Value(fx.Graph().placeholder("value"))
    set_value(value.node, torch.empty(64, 64))
    operation = Operation(value.node, (), (value,), border=border, port=port)
    return BorderPrices(WEIGHED, {"x": 2}, microbatches, edges).us(operation, value, layout)


def test_a_parameter_costs_its_storage() -> None:
    assert us(Border.INPUT, PARAMETER, WHOLE) == pytest.approx(3.0 * BYTES)
    assert us(Border.INPUT, PARAMETER, ROWS) == pytest.approx(3.0 * BYTES / 2)


def test_the_value_of_an_edge_costs_its_transfer_and_what_a_rank_receives() -> None:
    assert us(Border.INPUT, EDGE, ROWS) == pytest.approx(BYTES / 2 + BYTES / 2 / 2, rel=0.01)
    assert us(Border.INPUT, EDGE, WHOLE) == pytest.approx(BYTES + BYTES / 2, rel=0.01)


def test_gradients_of_edges_cost_what_is_received_here_or_sent_back() -> None:
    assert us(Border.TANGENT, EDGE, ROWS) == pytest.approx(BYTES / 2 / 2)
    assert us(Border.GRADIENT, EDGE, ROWS) == pytest.approx(BYTES / 2, rel=0.01)
    assert us(Border.OUTPUT, EDGE, ROWS) == 0


def test_a_partial_gradient_costs_one_sum_for_all_microbatches() -> None:
    once = us(Border.GRADIENT, PARAMETER, SUMMED, microbatches=1)
    assert once == pytest.approx(WEIGHED.bucketed_us("x", BYTES))
    assert us(Border.GRADIENT, PARAMETER, SUMMED, microbatches=4) == pytest.approx(once / 4)
    assert us(Border.GRADIENT, PARAMETER, ROWS) == 0
