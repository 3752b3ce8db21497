"""Every part of the price counts: collectives, few and shared, edges between stages, and saved values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.hardware.network import Network
from fxpar.ir.layout import Layout, Shard
from fxpar.ir.stage import Port, PortKind, StageBorder
from tests.layouts.laid_out import decomposed, lay_out, pins_of, prices
from tests.passes.programs_to_lay_out import COLUMNS, ROWS, Gated, Residual, latency_counts


def test_partial_sums_are_added_before_they_are_reduced() -> None:
    model = Gated()
    joint = decomposed(model, torch.randn(16, 32), with_backward=False)
    pins = pins_of(model, {"?1.weight": COLUMNS, "?2.weight": ROWS})
    laid = lay_out(joint, pins, latency_counts(), x=2)
    assert [c.kind for c in laid.collectives] == ["reduce_scatter"], "one reduction, of what is free to leave sharded"


@pytest.mark.parametrize(("edge_bytes_per_us", "layout"), [(1.0, "[2@x*8, 32]"), (1e9, "[16, 32]")])
def test_an_edge_enters_in_shards_where_the_way_between_stages_is_slow(edge_bytes_per_us: float, layout: str) -> None:
    """Sharded, every rank receives half of it, and a gather follows."""
    model = Gated()
    joint = decomposed(model, torch.randn(16, 32), with_backward=False)
    edge = Port(PortKind.EDGE, "x")
    joint = replace(joint, inputs=tuple(edge if port.kind is PortKind.INPUT else port for port in joint.inputs))
    weighed = replace(latency_counts(), edge_bytes_per_us=edge_bytes_per_us)
    laid = lay_out(joint, pins_of(model, {"?1.weight": COLUMNS, "?2.weight": ROWS}), weighed, x=2)
    assert str(laid.border.inputs[edge]) == layout


@pytest.mark.parametrize(("gather_bytes_per_us", "layout"), [(100.0, "[2@x*8, 32]"), (0.5, "[16, 32]")])
def test_an_edge_is_gathered_in_the_stage_where_that_is_quicker_than_between(
    gather_bytes_per_us: float, layout: str
) -> None:
    """Each host of the stage lacks all of it. One half could come from the other host instead of from afar."""
    model = Gated()
    joint = decomposed(model, torch.randn(16, 32), with_backward=False)
    edge = Port(PortKind.EDGE, "x")
    joint = replace(joint, inputs=tuple(edge if port.kind is PortKind.INPUT else port for port in joint.inputs))
    made = StageBorder({}, {edge: Layout((16, 32), (("x", Shard(0, 2)),))}, {}, {})
    weighed = prices(latency_us=0.0, bytes_per_us=gather_bytes_per_us)
    weighed = replace(weighed, network=Network(bytes_per_us=1.0, chunk_us=1e-3))
    pins = pins_of(model, {"?1.weight": COLUMNS, "?2.weight": ROWS})
    laid = lay_out(joint, pins, weighed, hosts=(0, 1, 2, 3), earlier=[made], pipe=2, x=2)
    assert str(laid.border.inputs[edge]) == layout


class TwoReaders(nn.Module):
    """A value that lies in columns, and two matmuls that need all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wide(x).sin()
        return self.first(x), self.second(x)


def test_a_move_that_two_readers_need_is_made_once() -> None:
    model = TwoReaders()
    joint = decomposed(model, torch.randn(16, 32), with_backward=False)
    laid = lay_out(joint, pins_of(model, {"*.weight": COLUMNS}), latency_counts(), x=2)
    assert [c.kind for c in laid.collectives] == ["all_gather"]


class WholeAndShard(nn.Module):
    """A partial sum that one reader needs whole and another in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(self.up(x))
        return fxpar.shard(y.sin(), (None, None)), fxpar.shard(y.cos(), ("x", None))


def test_a_shard_of_what_is_made_whole_anyway_is_a_slice() -> None:
    model = WholeAndShard()
    joint = decomposed(model, torch.randn(16, 32), with_backward=False)
    pins = pins_of(model, {"up.weight": COLUMNS, "down.weight": ROWS})
    laid = lay_out(joint, pins, latency_counts(), x=2)
    assert [c.kind for c in laid.collectives] == ["all_reduce"]


@pytest.mark.parametrize("saved_us_per_byte", [0.0, 2e-3])
def test_the_price_of_saved_values_shards_what_the_backward_reads(saved_us_per_byte: float) -> None:
    model = Residual()
    joint = decomposed(model, torch.randn(16, 32))
    pins = pins_of(model, {"up.weight": COLUMNS, "down.weight": ROWS})
    laid = lay_out(joint, pins, prices(latency_us=2.0, saved_us_per_byte=saved_us_per_byte), x=2)
    split = {"all_reduce", "reduce_scatter", "all_gather"} if saved_us_per_byte else {"all_reduce"}
    assert {c.kind for c in laid.collectives} == split
