"""What moves cost."""

from __future__ import annotations

import pytest

from fxpar.passes.moves import StepKind
from fxpar.planner.prices import Link, Prices, default_prices


def test_a_collective_costs_its_latency_and_its_bytes() -> None:
    prices = Prices({"x": Link(10.0, 100.0)}, 1.0, 1.0, 50.0, 0.0, 0.0, reduce_scatter_factor=2.0)
    assert prices.move_us(StepKind.ALL_GATHER, "x", bytes_sent=1000, bytes_kept=2000) == 20
    assert prices.move_us(StepKind.REDUCE_SCATTER, "x", bytes_sent=1000, bytes_kept=500) == 30
    assert prices.bucketed_us("x", bytes_sent=1000) == 10


def test_a_slice_is_read_and_written_in_memory() -> None:
    prices = Prices({"x": Link(10.0, 100.0)}, 1.0, 1.0, 50.0, 0.0, 0.0)
    assert prices.move_us(StepKind.SLICE, "x", bytes_sent=0, bytes_kept=100) == 4


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_both_automatic_axes_have_a_default_link(device_type: str) -> None:
    assert default_prices(device_type).links.keys() == {"y", "x"}
