"""Writes the graph of a pipeline: nodes with their logical values, grouped by the stage that they run on."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.ir import node_meta
from fxpar.ir.layout import Layout
from fxpar.ir.node_meta import Placed
from fxpar.ir.stage import JointGraph, Port
from fxpar.resharding.pipeline import Reshard, set_reshard
from fxpar.world.mesh import Mesh

aten = torch.ops.aten


class StageCall(nn.Module):
    """Stands for the forward or the backward of a stage in the graph of a pipeline, which is dumped but never run.

    Args:
        joint: the joint graph of the stage.
        apart: the ports whose values the forward takes, and whose gradients the backward returns, one by one.
    """

    def __init__(self, joint: JointGraph, apart: Sequence[Port], *, is_backward: bool = False) -> None:
        super().__init__()
        self.joint, self.apart, self.is_backward = joint, tuple(apart), is_backward


class PipelineGraph:
    """An FX graph to append to; new nodes belong to the stage of the last `turn_to`."""

    def __init__(self, mesh: Mesh, placement: Sequence[int]) -> None:
        self._mesh, self._placement = mesh, placement
        self._graph, self._root = fx.Graph(), nn.Module()
        self._group, self._is_backward = "", False
        self.reshards: list[Reshard] = []

    def turn_to(self, stage: int, *, backward: bool = False) -> None:
        """Let the following nodes belong to `stage`."""
        self._group, self._is_backward = _title(stage, self._placement[stage], self._mesh), backward

    def enter(self, name: str, like: Tensor | dict[Port, Tensor]) -> fx.Node:
        """A new input."""
        node = self._graph.placeholder(name)
        node_meta.set_value(node, like)
        return node

    def call(self, name: str, module: StageCall, arguments: Iterable[fx.Node]) -> fx.Node:
        """The call of `module`, which belongs to the pipeline from now on; it returns a tuple."""
        self._root.add_module(name, module)
        return self._note(self._graph.create_node("call_module", name, tuple(arguments), name=name))

    def item(self, call: fx.Node, position: int, name: str) -> fx.Node:
        """An item of what a call returns, if it is no tensor."""
        arguments = call, position
        return self._note(self._graph.create_node("call_function", operator.getitem, arguments, name=name))

    def tensor(self, call: fx.Node, position: int, name: str, like: Tensor, layout: Layout) -> fx.Node:
        """A tensor that a call returns."""
        return _valued(self.item(call, position, name), like, layout)

    def move(self, value: fx.Node, by: Reshard) -> fx.Node:
        """`value` on the stages that it moves to."""
        crossing = by.crossing
        name = "_".join((value.name, "on", *map(str, crossing.targets)))
        arguments = value, crossing.source, list(crossing.targets)
        node = self._graph.create_node("call_function", torch.ops.fxpar.reshard.default, arguments, name=name)
        set_reshard(node, by)
        self.reshards.append(by)
        layouts = set(crossing.target_layouts)
        return _valued(self._note(node), node_meta.tensor(value), layouts.pop() if len(layouts) == 1 else None)

    def total(self, terms: list[fx.Node], name: str) -> fx.Node:
        """The sum of values of one layout; a single value is returned as it is."""
        so_far, *others = terms
        for term in others:
            so_far = self._like(term, aten.add.Tensor, (so_far, term), name)
        return so_far

    def zeros_like(self, value: fx.Node, name: str) -> fx.Node:
        """Zeros in the layout of `value`."""
        return self._like(value, aten.zeros_like.default, (value,), name)

    def _like(self, value: fx.Node, op: torch._ops.OpOverload, arguments: tuple[fx.Node, ...], name: str) -> fx.Node:
        node = self._graph.create_node("call_function", op, arguments, name=name)
        return _valued(self._note(node), node_meta.tensor(value), node_meta.layout_of(value))

    def finish(self, returned: Any) -> fx.GraphModule:
        """The module, which returns `returned`: nodes in tuples and dicts."""
        self._graph.output(returned)
        return lazy_graph_module(self._root, self._graph)

    def _note(self, node: fx.Node) -> fx.Node:
        node_meta.set_group(node, self._group)
        node_meta.tag_direction(node, backward=self._is_backward)
        return node


def _valued(node: fx.Node, like: Tensor, layout: Layout | None) -> fx.Node:
    node_meta.set_value(node, like)
    if layout is not None:
        node_meta.set_placed(node, Placed((), (layout,)))
    return node


def _title(stage: int, pipe: int, mesh: Mesh) -> str:
    ranks = [mesh.rank_at(coordinate) for coordinate in mesh.stage_coordinates(pipe)]
    hosts = sorted({mesh.hosts[rank] for rank in ranks})
    return f"stage {stage}: {_counted('rank', ranks)} on {_counted('host', hosts)}"


def _counted(noun: str, numbers: list[int]) -> str:
    """`rank 0`, `hosts 0-3`, or `hosts 0, 2`."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"{noun} {first}"
    is_run = numbers == list(range(first, last + 1))
    return f"{noun}s {f'{first}-{last}' if is_run else ', '.join(map(str, numbers))}"
