"""The messages of a pipeline according to the stages' graphs, and to the transfer plans, for the checker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import fx

from fxpar.ir.layout import Layout
from fxpar.ir.node_meta import tensor
from fxpar.ir.stage import PlannedStage, Port, PortKind
from fxpar.passes.stages.crossings import StageNodes
from fxpar.resharding.pipeline import Crossing
from fxpar.schedule.message import End, Message, Messages


def pipeline_messages(stages: Sequence[PlannedStage], crossings: Iterable[Crossing]) -> Messages:
    """Every edge at its ends: as the graphs and borders of `stages` have it, and as `crossings` plan to move it.

    Shapes are those of the whole value of one microbatch and batch shard. If no result of a stage depends on an edge
    that it takes, its graph has no gradient of the edge: the stage sends back zeros like the value.
    """
    graphs: dict[End, Message] = {}
    for stage in map(StageNodes.of, stages):
        graphs.update(_of_graph(stage))
    plans: defaultdict[End, list[Message]] = defaultdict(list)
    for crossing in crossings:
        if not crossing.is_of_parameter:
            for end, message in _of_plan(crossing):
                plans[end].append(message)
    return Messages(graphs, plans)


def _of_graph(stage: StageNodes) -> Iterator[tuple[End, Message]]:
    border = stage.border
    yield from _edges(stage, stage.inputs, border.inputs, is_gradient=False)
    yield from _edges(stage, stage.outputs, border.outputs, is_gradient=False)
    yield from _edges(stage, stage.inputs, border.inputs, is_gradient=True)
    yield from _edges(stage, stage.tangents, border.tangents, is_gradient=True)
    yield from _edges(stage, stage.gradients, border.gradients, is_gradient=True)


def _edges(
    stage: StageNodes, nodes: Mapping[Port, fx.Node], layouts: Mapping[Port, Layout], *, is_gradient: bool
) -> Iterator[tuple[End, Message]]:
    for port, node in nodes.items():
        if port.kind is PortKind.EDGE:
            value = tensor(node)
            yield (port.name, stage.index, is_gradient), Message(tuple(value.shape), value.dtype, layouts[port])


def _of_plan(crossing: Crossing) -> Iterator[tuple[End, Message]]:
    """What a plan moves, at its source and all its targets."""
    stages = crossing.source, *crossing.targets
    layouts = crossing.source_layout, *crossing.target_layouts
    for stage, layout in zip(stages, layouts, strict=True):
        message = Message(layout.shape, crossing.dtype, layout)
        yield (crossing.port.name, stage, crossing.is_gradient), message
