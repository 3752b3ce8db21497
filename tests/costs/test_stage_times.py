"""Times of stages: the parts of an estimated backward add up to it, and ranks agree on what they measured."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.compiler import plan_stages
from fxpar.costs.prices import prices_of
from fxpar.costs.stage_times import estimate_costs, gather_costs, stage_times
from fxpar.ir.stage import PlannedStage
from fxpar.ir.trace_forward import capture_forward
from fxpar.model.distribution import distribution_of
from fxpar.passes.insert_reshards import insert_reshards
from fxpar.schedule import Costs, Kind, StageMemory, chain
from fxpar.world.launch import run_ranks
from fxpar.world.mesh import Mesh
from tests.support.fake_mesh import fake_mesh


class Net(nn.Module):
    """Three layers that cost alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()


OPENERS, INPUTS = ["layers.1", "layers.2"], (torch.zeros(32, 64, device="meta"),)


def _planned(*, with_backward: bool = True) -> tuple[tuple[PlannedStage, ...], Costs]:
    with fake_mesh(pipe=3) as mesh:
        torch.compiler.reset()
        model = fxpar.distribute(Net(), mesh, stages=OPENERS, example_inputs=INPUTS)
        capture = capture_forward(model, "cpu", INPUTS)
        distribution = distribution_of(capture.model)
        stages = plan_stages(capture, distribution, OPENERS, with_backward=with_backward)
        pipeline = insert_reshards(stages, mesh, distribution.final_plan.parameters)
        return stages, estimate_costs(stages, pipeline, mesh, distribution.placement)


def test_the_parts_of_a_backward_add_up_to_it() -> None:
    stages, costs = _planned()
    for stage in stages:
        times = costs.compute_us[stage.joint.index]
        assert times["I"] + times["W"] == pytest.approx(times["B"])
        assert times["F"] > 0 and times["W"] > 0


def test_the_first_stage_has_no_gradients_to_send_and_those_in_the_middle_halve_their_backward() -> None:
    _, costs = _planned()
    first, middle = costs.compute_us[0], costs.compute_us[1]
    assert first["I"] == 0 and first["W"] == first["B"]
    assert middle["B"] == pytest.approx(2 * middle["F"], rel=0.3), "two matrix products for one"
    assert middle["W"] == pytest.approx(middle["F"], rel=0.3)


def test_ranks_that_share_a_stage_share_its_work() -> None:
    stages, _ = _planned()
    alone, shared = (stage_times(stages[1], num_ranks, prices_of(Mesh())) for num_ranks in (1, 4))
    assert {kind: time_us / 4 for kind, time_us in alone.items()} == pytest.approx(shared)


def test_an_evaluation_has_no_backward_to_take_time() -> None:
    _, costs = _planned(with_backward=False)
    assert all(times["B"] == times["I"] == times["W"] == 0 < times["F"] for times in costs.compute_us.values())


def gather(times: Mapping[int, Mapping[int, Mapping[Kind, float]]]) -> Costs:
    """What a rank knows after all have told what they know of their own stages."""
    rank = dist.get_rank()
    memory = {stage: StageMemory(parameters=rank) for stage in times[rank]}
    return gather_costs(Costs((0, 1), chain(2), times[rank], {}, memory=memory))


def test_ranks_know_the_same_of_all_stages_and_the_slowest_and_fullest_of_a_stage_count() -> None:
    """Ranks 0 and 1 share stage 0, and each is slower at something."""
    times: dict[int, dict[int, dict[Kind, float]]] = {
        0: {0: {"F": 1.0, "B": 5.0}},
        1: {0: {"F": 2.0, "B": 4.0}},
        2: {1: {"F": 3.0, "B": 6.0}},
    }
    for costs in run_ranks(3, gather, times):
        assert costs.compute_us == {0: {"F": 2.0, "B": 5.0}, 1: {"F": 3.0, "B": 6.0}}
        assert {stage: figures.parameters for stage, figures in costs.memory.items()} == {0: 1, 1: 2}
