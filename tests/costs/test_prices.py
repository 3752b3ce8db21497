"""What moves cost."""

from __future__ import annotations

import pytest
import torch

from fxpar.costs import equations as eq
from fxpar.costs.prices import Link, Prices, agnostic_prices_of, prices_of
from fxpar.graph.redistribute import RedistributeKind
from fxpar.hardware.cluster import cluster_named
from fxpar.world.mesh import Mesh


def test_a_collective_costs_its_latency_and_its_bytes() -> None:
    prices = Prices({"x": Link(10.0, 100.0)}, 1.0, 1.0, 50.0, 0.0, 0.0, reduce_scatter_factor=2.0)
    assert prices.move_us(RedistributeKind.ALL_GATHER, "x", bytes_sent=1000, bytes_kept=2000) == 20
    assert prices.move_us(RedistributeKind.REDUCE_SCATTER, "x", bytes_sent=1000, bytes_kept=500) == 30
    assert prices.bucketed_us("x", bytes_sent=1000) == 10


def test_a_slice_is_read_and_written_in_memory() -> None:
    prices = Prices({"x": Link(10.0, 100.0)}, 1.0, 1.0, 50.0, 0.0, 0.0)
    assert prices.move_us(RedistributeKind.SLICE, "x", bytes_sent=0, bytes_kept=100) == 4


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_without_a_cluster_a_typical_one_of_the_devices_is_taken(device_type: str) -> None:
    prices = prices_of(Mesh(y=2, x=2, device_type=device_type))
    assert prices.links.keys() == {"data", "z", "y", "x"}


def test_an_axis_costs_more_where_it_crosses_hosts() -> None:
    mesh = Mesh(y=2, x=2, hosts=(0, 0, 1, 1), device_type="cuda", cluster=cluster_named("p3.8xlarge"))
    links = prices_of(mesh).links
    assert links["x"] == Link(10.0, 1e5)
    assert links["y"] == Link(50.0, 1250 / 2), "two rings share the interface"


def test_without_hosts_in_sight_all_axes_have_the_network_between_them() -> None:
    mesh = Mesh(y=2, x=4, hosts=(0, 0, 0, 0, 1, 1, 1, 1), device_type="cuda", cluster=cluster_named("p3.8xlarge"))
    links = agnostic_prices_of(mesh).links
    assert links["x"] == Link(100.0, 1250.0)
    assert links["y"] == Link(50.0, 1250.0)
    assert all(eq.agnostic_bandwidth(axis) == eq.beta_inter for axis in eq.AXES)


def test_arithmetic_goes_at_the_rate_of_its_dtype() -> None:
    prices = prices_of(Mesh(cluster=cluster_named("dgx-a100")))
    assert prices.arithmetic_us(312e6, torch.bfloat16) == 1
    assert prices.arithmetic_us(19.5e6, torch.float32) == prices.arithmetic_us(19.5e6, torch.int64) == 1
