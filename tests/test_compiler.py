"""What planning does grows with the kinds of layers and stages: not with their copies, nor with ranks."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from fxpar.compiler import plan_stages
from fxpar.costs.placement import consecutive_hosts
from fxpar.layouts.search import Search
from fxpar.passes import decompose_for_sharding, trace_joint
from fxpar.resharding import pipeline
from fxpar.world.mesh import Mesh
from tests.support.captures import captured

WIDTH = 16


class Layer(nn.Module):
    """A norm and an MLP around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.middle = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.middle(torch.relu(self.up(self.norm(x)))))
        return x + 0.5 * torch.tanh(self.down(h))


class Layers(nn.Module):
    """Equal layers, one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@dataclass(frozen=True, slots=True)
class Work:
    """How often planning did what takes long."""

    traces: int
    decompositions: int
    searches: int
    transfer_plans: int


def work(layers: int, pipe: int, data: int = 1) -> Work:
    """The work of planning `layers` layers in equal stages, on hosts of two ranks."""
    ranks = pipe * data * 2
    mesh = Mesh(pipe=pipe, data=data, x=2, hosts=consecutive_hosts(ranks, 2))
    capture, distribution = captured(Layers(layers), (torch.randn(8, WIDTH),), mesh=mesh)
    distribution.placement = tuple(range(pipe))
    boundaries = [f"layers.{stage * layers // pipe}" for stage in range(1, pipe)]
    pipeline._plan_of.cache_clear()
    with (
        patch.object(trace_joint, "trace_whole", side_effect=trace_joint.trace_whole) as traces,
        patch.object(decompose_for_sharding, "make_fx", side_effect=decompose_for_sharding.make_fx) as decompositions,
        patch.object(Search, "run", autospec=True, side_effect=Search.run) as searches,
        patch.object(pipeline, "make_plan", side_effect=pipeline.make_plan) as plans,
    ):
        plan_stages(capture, distribution, boundaries)
    return Work(traces.call_count, decompositions.call_count, searches.call_count, plans.call_count)


@pytest.fixture(scope="module")
def few() -> Work:
    """The work for two layers in each of four stages."""
    found = work(layers=8, pipe=4)
    assert found.searches == 3, "the first stage, those between, and the last"
    return found


def test_more_equal_stages_are_no_more_work(few: Work) -> None:
    assert work(layers=16, pipe=8) == few


def test_equal_stages_of_one_layer_are_traced_once() -> None:
    first, last = 1, 1
    assert work(layers=4, pipe=4).traces == work(layers=8, pipe=8).traces == first + 1 + last


def test_more_equal_layers_are_no_more_work() -> None:
    assert work(layers=48, pipe=4) == work(layers=24, pipe=4)


def test_more_ranks_are_no_more_work(few: Work) -> None:
    assert work(layers=8, pipe=4, data=8) == few
