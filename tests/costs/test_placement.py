"""What an axis has of the network is counted on the hosts themselves, and is Eq. 10 wherever that is made for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpar.costs import equations as eq
from fxpar.costs.placement import Spread, bytes_per_us, consecutive_hosts, latency_us, spread
from fxpar.hardware.cluster import Cluster, cluster_named
from fxpar.world.mesh import Mesh

CLUSTER = replace(
    cluster_named("laptop"),
    intra_bytes_per_us=1e6,
    interface_bytes_per_us=1e3,
    intra_latency_us=1.0,
    inter_latency_us=100.0,
)


def on_hosts(ranks_per_host: int, **sizes: int) -> Mesh:
    num_ranks = Mesh(**sizes).num_ranks
    return Mesh(**sizes, hosts=consecutive_hosts(num_ranks, ranks_per_host))


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4, 8])
@pytest.mark.parametrize("num_ranks", [8, 16])
def test_on_powers_of_two_rings_share_hosts_as_equation_10_says(num_ranks: int, ranks_per_host: int) -> None:
    cluster = replace(CLUSTER, ranks_per_host=ranks_per_host)
    for sizes in eq.configurations(num_ranks):
        mesh = on_hosts(ranks_per_host, **sizes)
        values = {eq.size[axis]: size for axis, size in sizes.items()} | {
            eq.ranks_per_host: ranks_per_host,
            eq.beta_intra: cluster.intra_bytes_per_us,
            eq.beta_inter: cluster.host_bytes_per_us,
        }
        for axis, size in sizes.items():
            if size > 1:
                expected = float(eq.axis_bandwidth(axis).subs(values))
                assert bytes_per_us(cluster, spread(mesh, axis)) == expected, f"{axis} of {mesh}"


def test_the_mesh_of_the_paper_stays_on_hosts_along_x_and_y_and_shares_them_four_times_along_z() -> None:
    mesh = on_hosts(4, x=2, y=2, z=4)
    found = {axis: spread(mesh, axis).rings_per_host for axis in ("x", "y", "z", "data")}
    assert found == {"x": 0, "y": 0, "z": 4, "data": 0}


def test_a_group_that_does_not_fit_beside_its_like_leaves_its_host_though_it_is_smaller() -> None:
    """Six ranks on a host and groups of four: every second group is cut, where Eq. 10 sees an axis inside hosts."""
    assert spread(on_hosts(6, x=4, y=3), "x") == Spread(4, 2, 1)
    assert spread(on_hosts(6, x=3, y=4), "x") == Spread(3, 1, 0)
    assert spread(on_hosts(6, x=3, y=4), "y") == Spread(4, 2, 3)


def test_ranks_need_not_lie_on_consecutive_hosts() -> None:
    mesh = Mesh(y=2, x=2, hosts=(0, 1, 0, 1))
    assert spread(mesh, "x").rings_per_host == 2
    assert spread(mesh, "y").rings_per_host == 0


def test_stages_on_one_host_share_its_network() -> None:
    assert spread(Mesh(pipe=2, data=2, hosts=(0, 1, 0, 1)), "data") == Spread(2, 2, 2)
    assert spread(Mesh(pipe=2, data=2, hosts=(0, 1, 2, 3)), "data") == Spread(2, 2, 1)


def test_an_axis_of_one_rank_needs_no_network() -> None:
    assert spread(on_hosts(1, x=4), "y") == Spread(1, 1, 0)


def test_several_interfaces_carry_several_rings() -> None:
    lies = spread(on_hosts(4, y=2, x=4), "y")
    assert lies.rings_per_host == 4
    assert bytes_per_us(CLUSTER, lies) == 250
    assert bytes_per_us(replace(CLUSTER, interfaces_per_host=4), lies) == 1000


def test_a_ring_is_no_faster_than_the_links_inside_its_hosts() -> None:
    fast: Cluster = replace(CLUSTER, interface_bytes_per_us=1e9)
    assert bytes_per_us(fast, spread(on_hosts(2, x=4), "x")) == fast.intra_bytes_per_us


@pytest.mark.parametrize(
    ("sizes", "us"),
    [({"x": 4}, 2 * 1.0), ({"x": 8}, 2 * 1.0 + 100.0), ({"x": 4, "y": 4}, 200.0), ({"y": 2}, 1.0), ({"x": 1}, 0.0)],
)
def test_messages_between_hosts_wait_longer_than_those_inside(sizes: dict[str, int], us: float) -> None:
    """Along the outermost axis of each mesh, on hosts of four ranks."""
    assert latency_us(CLUSTER, spread(on_hosts(4, **sizes), list(sizes)[-1])) == pytest.approx(us)
