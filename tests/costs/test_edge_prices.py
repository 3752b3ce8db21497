"""Edges cost the time of their way between hosts, and stages take them as is cheapest with what they do next."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxpar.costs.edge_prices import EdgePrices
from fxpar.hardware.network import Network
from fxpar.ir.layout import Layout, Shard
from fxpar.ir.stage import Port, PortKind, StageBorder
from fxpar.world.mesh import Mesh

EDGE = Port(PortKind.EDGE, "h")
ROWS, COLUMNS = (Layout((64, 64), (("x", Shard(dim, 2)),)) for dim in (0, 1))
WHOLE = Layout((64, 64))
NETWORK = Network(bytes_per_us=1.0, chunk_us=1e-3)
SIZE = 64 * 64 * 4


def edge_prices(hosts: tuple[int, ...], network: Network = NETWORK) -> EdgePrices:
    """Of the second of two stages over x=2; the first has its edge, and needs its gradient, in rows."""
    made = StageBorder({}, {EDGE: ROWS}, {EDGE: ROWS}, {})
    return EdgePrices([made], replace(Mesh(pipe=2, x=2), hosts=hosts), network)


@pytest.mark.parametrize(
    ("hosts", "layout", "us"),
    [
        ((0, 0, 1, 1), WHOLE, SIZE),  # all of it enters the one host, however it lies there
        ((0, 0, 1, 1), ROWS, SIZE),
        ((0, 1, 2, 3), WHOLE, SIZE),
        ((0, 1, 2, 3), ROWS, SIZE / 2),  # each host needs a half, and another has it
        ((0, 1, 0, 1), ROWS, 0.0),  # where each half is already
        ((0, 1, 0, 1), COLUMNS, SIZE / 4),
        ((0, 0, 0, 0), WHOLE, 0.0),
    ],
)
def test_a_value_costs_what_the_busiest_interface_must_carry(hosts: tuple[int, ...], layout: Layout, us: float) -> None:
    assert edge_prices(hosts).value_us(EDGE, layout, torch.float32) == pytest.approx(us, rel=0.01)
    if layout != WHOLE:
        assert edge_prices(hosts).gradient_us(EDGE, layout, torch.float32) == pytest.approx(us, rel=0.01)


def test_a_whole_gradient_goes_back_once() -> None:
    assert edge_prices((0, 1, 2, 3)).gradient_us(EDGE, WHOLE, torch.float32) == pytest.approx(SIZE / 2, rel=0.01)


def test_many_small_transfers_cost_more_than_few() -> None:
    """Between halves by rows and halves by columns there are four transfers; between equal ones two."""
    prices = edge_prices((0, 0, 1, 1), Network(bytes_per_us=1e6, chunk_us=50.0))
    few, many = (prices.value_us(EDGE, layout, torch.float32) for layout in (ROWS, COLUMNS))
    assert round(few) == 100
    assert round(many) == 200


def test_an_edge_of_a_stage_that_is_not_settled_has_no_price_yet() -> None:
    other = Port(PortKind.EDGE, "other")
    assert edge_prices((0, 1, 2, 3)).value_us(other, WHOLE, torch.float32) == 0
