"""What the graphs of stages give and take is held against the plans between them, and against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.compiler import plan_stages
from fxpar.errors import InvalidScheduleError
from fxpar.ir.layout import Layout, Shard
from fxpar.ir.node_meta import set_value
from fxpar.ir.stage import PlannedStage, Port, PortKind
from fxpar.ir.trace_forward import capture_forward
from fxpar.model.distribution import distribution_of
from fxpar.passes.insert_reshards import insert_reshards
from fxpar.passes.stages.crossings import StageNodes
from fxpar.passes.stages.pipeline_messages import pipeline_messages
from fxpar.resharding.pipeline import Crossing
from fxpar.schedule import Edge, build_schedule, check_programs, forward_only, lower
from tests.support.fake_mesh import fake_mesh


class Skipping(nn.Module):
    """The first layer's value is read by all later ones, by the last without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        first = self.layers[0](x)
        second = self.layers[1](first)
        return (self.layers[2](second) * first.detach()).mean()


def _planned(*, with_backward: bool = True) -> tuple[list[PlannedStage], tuple[Edge, ...], list[Crossing]]:
    """Three stages, each on two ranks, and what moves between them."""
    boundaries, inputs = ["layers.1", "layers.2"], (torch.randn(8, 4),)
    with fake_mesh(pipe=3, x=2) as mesh:
        torch.compiler.reset()
        model = Skipping()
        fxpar.distribute(model, mesh, stages=boundaries, layouts={"layers.0:out": (None, "x")}, example_inputs=inputs)
        capture = capture_forward(model, "cpu", inputs)
        distribution = distribution_of(capture.model)
        stages = plan_stages(capture, distribution, boundaries, with_backward=with_backward)
        pipeline = insert_reshards(stages, mesh, distribution.final_plan.parameters)
        return list(stages), pipeline.edges, [reshard.crossing for reshard in pipeline.reshards]


def _check(
    stages: Sequence[PlannedStage], edges: Sequence[Edge], crossings: Sequence[Crossing], *, training: bool = True
) -> None:
    schedule = build_schedule("1f1b", 3, 2)
    schedule = schedule if training else forward_only(schedule)
    check_programs(lower(schedule, edges), schedule, edges, pipeline_messages(stages, crossings))


@pytest.mark.parametrize("training", [True, False])
def test_what_the_passes_make_fits(training: bool) -> None:
    stages, edges, crossings = _planned(with_backward=training)
    assert len(edges) == 2 and any(len(edge.targets) == 2 for edge in edges)
    _check(stages, edges, crossings, training=training)


def _rejected(stages: Sequence[PlannedStage], edges: Sequence[Edge], crossings: Sequence[Crossing]) -> str:
    with pytest.raises(InvalidScheduleError) as caught:
        _check(stages, edges, crossings)
    return str(caught.value)


def test_a_border_that_lies_otherwise_than_what_arrives_is_rejected() -> None:
    stages, edges, crossings = _planned()
    shared = next(edge for edge in edges if len(edge.targets) == 2)
    port = Port(PortKind.EDGE, shared.name)
    border = stages[2].border
    other = Layout((8, 4), (("x", Shard(0, 2)),))
    assert border.inputs[port] != other
    stages[2] = replace(stages[2], border=replace(border, inputs={**border.inputs, port: other}))
    message = _rejected(stages, edges, crossings)
    assert message.startswith("rank 2, instruction")
    assert f"stage 2 receives edge {shared.name} with shape [8, 4], dtype float32, layout {other}" in message
    assert f"--> wait {shared.name}[0] 0->1,2 <--" in message


def test_a_plan_for_another_dtype_is_rejected_where_it_begins() -> None:
    stages, edges, crossings = _planned()
    value = next(crossing for crossing in crossings if not crossing.is_gradient)
    crossings[crossings.index(value)] = replace(value, dtype=torch.float64)
    message = _rejected(stages, edges, crossings)
    assert f"is planned with shape [8, 4], dtype float64, layout {value.source_layout}" in message
    assert f"--> send {value.port.name}[0]" in message


@pytest.mark.parametrize("wrong", [torch.float64, torch.float16])
def test_a_graph_that_takes_another_dtype_is_rejected(wrong: torch.dtype) -> None:
    stages, edges, crossings = _planned()
    edge = next(edge for edge in edges if edge.source == 1)
    node = StageNodes.of(stages[2]).inputs[Port(PortKind.EDGE, edge.name)]
    set_value(node, node.meta["val"].to(wrong))
    message = _rejected(stages, edges, crossings)
    dtype = str(wrong).removeprefix("torch.")
    assert f"stage 2 expects edge {edge.name} with shape [8, 4], dtype {dtype}, layout" in message
    assert "and found it with shape [8, 4], dtype float32" in message
    assert "from stage 1" in message
    assert f"--> wait {edge.name}[0] 1->2 <--" in message
