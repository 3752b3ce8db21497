"""What many layers come to is told by few of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.hardware.cluster import cluster_named
from fxpar.planner.layers import Layers, find_layers, layers_to_sample, sample_counts, with_layers
from fxpar.planner.search import plan
from tests.support.fake_mesh import fake_mesh

CLUSTER = replace(cluster_named("laptop"), ranks_per_host=2)
LAYERS, WIDTH, ROWS = 6, 32, 64


class Deep(nn.Module):
    """Layers between two that are not like them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.others = nn.ModuleList([nn.Linear(WIDTH, 4), nn.Linear(4, 1)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        for other in self.others:
            x = other(x)
        return x.mean()


def on_meta() -> tuple[Deep, tuple[Tensor]]:
    with torch.device("meta"):
        return Deep(), (torch.zeros(ROWS, 8),)


def test_the_longest_list_of_modules_alike_is_found() -> None:
    model, _ = on_meta()
    assert find_layers(model) == Layers("layers", LAYERS)
    assert find_layers(nn.Linear(2, 2)) is None
    fewer = with_layers(model, Layers("layers", LAYERS), 2)
    assert isinstance(fewer, Deep)
    assert len(fewer.layers) == 2 and len(model.layers) == LAYERS


def test_hints_for_single_layers_need_all_of_them() -> None:
    model, _ = on_meta()
    assert layers_to_sample(model, ["layers.*.0.weight", "first.weight"]) == Layers("layers", LAYERS)
    assert layers_to_sample(model, ["layers.3.0.weight"]) is None


def test_a_stage_has_one_layer_and_two_where_there_are_more() -> None:
    layers = Layers("layers", 9)
    assert [sample_counts(layers, pipe) for pipe in (1, 2, 4, 5)] == [(2, 4), (2, 4), (4, 8), None]
    assert sample_counts(None, 1) is None


@pytest.mark.parametrize("axis", ["data", "z", "x"])
def test_few_layers_tell_what_all_come_to(axis: str) -> None:
    few, all_of_them = (plan(*on_meta(), CLUSTER, 2, axes=(axis,), whole=whole).best for whole in (False, True))
    assert few.step_us == pytest.approx(all_of_them.step_us, rel=0.02)
    assert few.compute_us == pytest.approx(all_of_them.compute_us, rel=0.02)
    assert few.peak_bytes == pytest.approx(all_of_them.peak_bytes, rel=0.02)
    assert few.traffic[axis].bytes_sent == pytest.approx(all_of_them.traffic[axis].bytes_sent, rel=0.02)
    assert few.plan.parameters == all_of_them.plan.parameters


def test_stages_of_a_pipeline_have_as_many_layers_each() -> None:
    found = plan(*on_meta(), CLUSTER, 2, axes=("pipe",), microbatches=[4], schedules=["1f1b"]).best
    assert found.plan.stages == ("layers.3",)
    stages = {name: planned.stage for name, planned in found.plan.parameters.items()}
    assert stages["first.weight"] == stages["layers.2.0.weight"] == 0
    assert stages["layers.3.0.weight"] == stages["others.1.bias"] == 1
    with fake_mesh(pipe=2) as mesh:
        torch.compiler.reset()
        model = fxpar.distribute(Deep(), mesh, plan=found.plan)
        assert {name for name, _ in model.named_parameters()} == {name for name, stage in stages.items() if stage == 0}
