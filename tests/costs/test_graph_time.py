"""Times of local graphs: a roofline for what is computed, the paper's equations for what is sent beside it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar.costs.graph_time import GraphModel, GraphTime, Traffic, add_up
from fxpar.costs.placement import consecutive_hosts
from fxpar.costs.prices import prices_of
from fxpar.hardware.cluster import cluster_named
from fxpar.ir.node_meta import Communication, set_communication
from fxpar.ir.overlap_options import Overlap
from fxpar.ir.stage import JointGraph
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.overlap_collectives import overlap_collectives
from fxpar.passes.propagate_layouts import propagate_layouts
from fxpar.world.mesh import Mesh
from tests.layouts.laid_out import decomposed, pins_of
from tests.passes.fusing import fuse_always, modules_of
from tests.passes.gathers_to_fuse import rows
from tests.support.fake_mesh import fake_mesh

CLUSTER = replace(
    cluster_named("laptop"),
    matmul_flops_per_us={"float32": 1e4},
    memory_bytes_per_us=1e3,
    intra_bytes_per_us=100.0,
    intra_latency_us=1.0,
    interface_bytes_per_us=10.0,
    inter_latency_us=2.0,
    reduce_scatter_factor=2.0,
)


def model_of(ranks_per_host: int, **sizes: int) -> GraphModel:
    num_ranks = Mesh(**sizes).num_ranks
    mesh = Mesh(**sizes, hosts=consecutive_hosts(num_ranks, ranks_per_host), cluster=CLUSTER)
    return GraphModel(mesh, prices_of(mesh))


@pytest.mark.parametrize(
    ("done", "sent", "us"),
    [
        (Communication("all_gather", "x", 4000), 3000, 2 * 1 + 3000 / 100),
        (Communication("all_reduce", "x", 4000), 6000, 2 * 1 + 6000 / 100),
        (Communication("all_to_all", "x", 4000), 3000, 2 * 1 + 3000 / 100),
        (Communication("reduce_scatter", "x", 4000), 3000, 2 * 1 + 2 * 3000 / 100),
        (Communication("all_gather", "y", 4000), 2000, 2 + 2000 / (10 / 4)),
        (Communication("all_reduce", "z", 4000), 0, 0),
    ],
)
def test_a_collective_takes_its_messages_and_the_bytes_of_a_ring(done: Communication, sent: float, us: float) -> None:
    """On x=4 inside hosts of four ranks and y=2 between two of them."""
    traffic = model_of(4, x=4, y=2).traffic(done)
    assert traffic.bytes_sent == sent
    assert traffic.time_us == pytest.approx(us)


class Layers(nn.Module):
    """Linear layers of one width."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def local_graph(num_layers: int, **sizes: int) -> JointGraph:
    """Layers in turns over columns and rows of x, as one local graph."""
    torch.compiler.reset()
    model = Layers(num_layers, 64)
    joint = decomposed(model, torch.randn(32, 64))
    with fake_mesh(**sizes) as mesh:
        hints = {f"layers.{i}.weight": ("x", None) if i % 2 == 0 else (None, "x") for i in range(num_layers)}
        propagate_layouts(joint, mesh, pins_of(model, hints), prices_of(mesh), microbatches=1)
        return insert_collectives(joint, mesh)


def test_a_matmul_takes_its_arithmetic_or_its_memory() -> None:
    (mm,) = [node for node in local_graph(1).module.graph.nodes if node.name == "mm"]
    flops, moved = 2 * 32 * 64 * 64, 4 * (32 * 64 * 2 + 64 * 64)
    assert model_of(1).compute_us(mm) == pytest.approx(max(flops / 1e4, moved / 1e3))
    mesh = Mesh(cluster=replace(CLUSTER, memory_bytes_per_us=1e9))
    assert GraphModel(mesh, prices_of(mesh)).compute_us(mm) == pytest.approx(flops / 1e4)


def test_views_cost_nothing_and_pointwise_operations_write_what_they_give() -> None:
    graph = local_graph(1).module.graph
    times = {node.name: model_of(1).compute_us(node) for node in graph.nodes}
    assert times["relu"] == pytest.approx(4 * 32 * 64 / 1e3)
    views = [name for name in times if re.fullmatch(r"(t|permute|expand|view)(_\d+)?", name)]
    assert views and all(times[name] == 0 for name in views)


def test_a_pair_of_sharded_layers_reduces_one_output_and_one_gradient() -> None:
    """Columns, then rows: an all-reduce forward, and none back to the input, which needs no gradient."""
    time = model_of(2, x=2).time(local_graph(2, x=2).module)
    activations = 32 * 64 * 4
    large = time.traffic["x"].bytes_sent
    assert activations <= large < 1.01 * activations * 2


def test_what_is_waited_for_where_it_starts_is_exposed_and_what_runs_beside_computing_is_not() -> None:
    local = local_graph(6, x=2)
    slow = GraphModel(Mesh(x=2, cluster=CLUSTER), replace(prices_of(Mesh(x=2, cluster=CLUSTER)), memory_bytes_per_us=1))
    plain = slow.time(local.module)
    traffic = sum(each.time_us for each in plain.traffic.values())
    assert plain.exposed_us == pytest.approx(traffic)
    assert plain.exposed_by_axis_us == {"x": pytest.approx(traffic)}
    beside = slow.time(overlap_collectives(local.module, Overlap()))
    assert beside.traffic == plain.traffic and beside.compute_us == pytest.approx(plain.compute_us)
    assert beside.exposed_us < 0.9 * plain.exposed_us
    assert sum(beside.exposed_by_axis_us.values()) == pytest.approx(beside.exposed_us)


def test_the_traffic_of_graphs_adds_up_by_axis() -> None:
    one, two = {"x": Traffic(1, 10.0, 2.0)}, {"x": Traffic(2, 5.0, 1.0), "z": Traffic(1, 1.0, 1.0)}
    assert add_up([one, two]) == {"x": Traffic(3, 15.0, 3.0), "z": Traffic(1, 1.0, 1.0)}
    assert Traffic(2, 5.0, 1.0).times(3) == Traffic(6, 15.0, 3.0)


def test_latencies_of_collectives_pass_at_once_but_their_bytes_one_after_another() -> None:
    graph = fx.Graph()
    for _ in range(3):
        start = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default)
        set_communication(start, Communication("all_gather", "x", 4000))
    graph.output(())
    slow = model_of(4, x=4)
    one = slow.traffic(Communication("all_gather", "x", 4000))
    time = slow.time(fx.GraphModule(nn.Module(), graph))
    assert time.total_us == pytest.approx(3 * (one.time_us - 2) + 2)
    assert time.traffic["x"] == one.times(3)
    assert time.exposed_by_axis_us == {"x": pytest.approx(time.total_us)}, "what nobody waits for ends the graph"


def test_a_fused_op_communicates_while_it_computes() -> None:
    with fake_mesh(x=2) as mesh:
        (apart, _) = modules_of(rows, mesh)
        (fused, _) = (each.module for each in fuse_always([apart, apart], mesh))
    model = model_of(2, x=2)
    before, after = model.time(apart), model.time(fused)
    assert after.traffic == before.traffic
    latency_us = 1.0
    assert after.total_us == pytest.approx(max(after.compute_us, after.traffic["x"].time_us) + latency_us)
    assert sum(after.exposed_by_axis_us.values()) == pytest.approx(after.exposed_us)


def test_an_empty_graph_takes_no_time() -> None:
    graph = fx.Graph()
    graph.output(())
    assert model_of(1).time(fx.GraphModule(nn.Module(), graph)) == GraphTime(0.0, 0.0)
