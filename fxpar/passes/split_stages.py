"""Cut the captured forward into one graph per pipeline stage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.errors import InvalidStagesError, StageNotFoundError, UnsupportedGraphError
from fxpar.graph.changes_in_place import storages_mutated_later
from fxpar.graph.shared_values import is_context, recomputable
from fxpar.ir.capture import Capture, example
from fxpar.ir.node_meta import is_wrapped, module_path, set_program_order, where
from fxpar.ir.stage import Port, PortKind, StageGraph
from fxpar.passes.stages.changed_edges import copy_changed_edges
from fxpar.progress.phases import as_phase


@dataclass(frozen=True, slots=True)
class _Cut:
    """Which stage each node belongs to, and which values every stage computes for itself.

    order: the operations of the forward, in order, with `places` of all nodes of the captured graph.
    contexts: the operations that enter or leave a context.
    mutations: as `storages_mutated_later` finds them.
    """

    stage_of: dict[fx.Node, int]
    recomputed: Set[fx.Node]
    num_stages: int
    order: Sequence[fx.Node]
    places: Mapping[fx.Node, int]
    contexts: Set[fx.Node]
    mutations: Sequence[tuple[fx.Node, fx.Node]]

    @classmethod
    def of(cls, capture: Capture, boundaries: Sequence[str]) -> _Cut:
        """The cut where the modules at the paths `boundaries` begin."""
        order = capture.operations()
        return cls(
            _assign(capture, boundaries),
            recomputable(order, capture.sources),
            len(boundaries) + 1,
            order,
            {node: place for place, node in enumerate(capture.module.graph.nodes)},
            {node for node in order if is_context(node)},
            list(storages_mutated_later(order)),
        )

    def own_nodes(self) -> list[list[fx.Node]]:
        """The operations of each stage that no other one runs."""
        found: list[list[fx.Node]] = [[] for _ in range(self.num_stages)]
        for node in self.order:
            if node not in self.recomputed and node not in self.contexts:
                found[self.stage_of[node]].append(node)
        return found


@as_phase
def split_stages(capture: Capture, boundaries: Sequence[str]) -> tuple[StageGraph, ...]:
    """Cut `capture` where the modules at the paths `boundaries` begin, in the order in which the forward runs.

    A value that a later stage uses becomes an edge, whether or not the stages are adjacent. Values that depend on
    inputs alone (masks, positions, rotary tables) are recomputed where they are used.

    Before: `h = embed(x); h = block0(h); h = block1(h); loss = head(h)` with boundaries `["block1"]`
    After:  stage 0: `h = embed(x); return block0(h)`; stage 1: `return head(block1(h))`

    Raises:
        StageNotFoundError: a path names no module whose forward runs.
        InvalidStagesError: a stage computes nothing of its own.
        UnsupportedGraphError: a stage changes in place what another stage computed, or begins inside a function that
            `torch.func` transforms.
    """
    capture, copies = copy_changed_edges(capture, _starts(capture, boundaries))
    cut = _Cut.of(capture, boundaries)
    own = cut.own_nodes()
    _check_work(own, boundaries)
    _check_mutations(cut)
    _check_transforms(cut)
    # Random numbers depend on those of their operations, and so not on where stages begin: copies come last.
    numbers = {node: number for number, node in enumerate(sorted(cut.order, key=copies.__contains__))}
    builders = [_StageBuilder(capture, cut, numbers, stage, nodes) for stage, nodes in enumerate(own)]
    edges = {node for builder in builders for node in builder.edges_in}
    return tuple(builder.build(edges) for builder in builders)


def _starts(capture: Capture, boundaries: Sequence[str]) -> list[int]:
    """Among the nodes of `capture`, without placeholders, the positions of those with which stages begin."""
    paths = [module_path(node) for node in capture.module.graph.nodes if node.op != "placeholder"]
    return sorted(_first_inside(paths, boundary) for boundary in boundaries)


def _assign(capture: Capture, boundaries: Sequence[str]) -> dict[fx.Node, int]:
    nodes = [node for node in capture.module.graph.nodes if node.op != "placeholder"]
    starts = _starts(capture, boundaries)
    stage_of: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        producer = node.args[0] if node.args else None
        if isinstance(producer, fx.Node) and not isinstance(producer.meta.get("example_value"), torch.Tensor):
            stage_of[node] = stage_of.get(producer, 0)  # an item of a tuple is in the stage of the tuple
        else:
            stage_of[node] = bisect_right(starts, index)
    return stage_of


def _first_inside(paths: Sequence[str], boundary: str) -> int:
    for index, path in enumerate(paths):
        if path == boundary or path.startswith(boundary + "."):
            return index
    raise StageNotFoundError(boundary, sorted(_with_parents(paths)), "names no module whose forward runs")


def _with_parents(paths: Sequence[str]) -> set[str]:
    parts = [path.split(".") for path in paths if path]
    return {".".join(path[:depth]) for path in parts for depth in range(1, len(path) + 1)}


def _check_work(own: Sequence[Sequence[fx.Node]], boundaries: Sequence[str]) -> None:
    for stage, nodes in enumerate(own[:-1]):  # the last one returns the results, if nothing else
        if not nodes:
            raise InvalidStagesError(
                f"stages: of those that begin at {', '.join(map(repr, boundaries))}, stage {stage} computes nothing "
                "but what depends on no parameter, which runs wherever it is used; begin stages elsewhere, or use fewer"
            )


def _check_transforms(cut: _Cut) -> None:
    for node in filter(is_wrapped, cut.order):
        if any(cut.stage_of[user] != cut.stage_of[node] for user in node.users):
            raise UnsupportedGraphError(
                f"a stage begins inside a function that torch.func transforms, after {where(node)}: expected one that "
                "begins before or after it; name another module, or use torch.autograd.grad"
            )


def _check_mutations(cut: _Cut) -> None:
    for owner, mutator in cut.mutations:
        if owner in cut.recomputed or cut.stage_of[owner] == cut.stage_of[mutator]:
            continue
        raise UnsupportedGraphError(
            f"{mutator.name} in stage {cut.stage_of[mutator]} (module {module_path(mutator)!r}) changes {owner.name} "
            f"of stage {cut.stage_of[owner]} in place; open the stage elsewhere, or write the operation out of place"
        )


class _StageBuilder:
    """Collects what one stage computes and what it takes from outside, then writes its graph."""

    def __init__(
        self, capture: Capture, cut: _Cut, numbers: Mapping[fx.Node, int], stage: int, own: Sequence[fx.Node]
    ) -> None:
        self._capture, self._cut, self._numbers, self._stage = capture, cut, numbers, stage
        self._nodes: set[fx.Node] = {*own, *cut.contexts}
        self._sources: set[fx.Node] = set()
        self.edges_in: set[fx.Node] = set()
        self._is_last = stage == cut.num_stages - 1
        pending = [used for node in self._nodes for used in node.all_input_nodes]
        pending += capture.results if self._is_last else []
        self._close_over(pending)
        if mutators := {m for owner, m in cut.mutations if owner in self._nodes and owner in cut.recomputed}:
            self._nodes |= mutators
            self._close_over([used for node in mutators for used in node.all_input_nodes])
        self._order = sorted(self._nodes, key=cut.places.__getitem__)

    def _close_over(self, pending: list[fx.Node]) -> None:
        while pending:
            node = pending.pop()
            if node in self._nodes:
                continue
            if node in self._capture.sources:
                self._sources.add(node)
            elif node in self._cut.recomputed:
                self._nodes.add(node)
                pending.extend(node.all_input_nodes)
            else:
                self.edges_in.add(node)

    def build(self, edges: Set[fx.Node]) -> StageGraph:
        """The stage's graph; `edges` are all values that some stage receives from another."""
        graph = ConcreteGraph()
        copies: dict[fx.Node, fx.Node] = {}
        placeholders: dict[Port, fx.Node] = {}
        for node in sorted(self._sources | self.edges_in, key=self._cut.places.__getitem__):
            port = self._capture.sources.get(node) or Port(PortKind.EDGE, node.name)
            if port not in placeholders:  # a tied weight is read at several nodes
                placeholders[port] = _placeholder(graph, node)
            copies[node] = placeholders[port]
        for node in self._order:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            set_program_order(copies[node], self._numbers[node])
        leaving = (
            []
            if self._is_last
            else [node for node in self._order if node in edges and node not in self._cut.recomputed]
        )
        outputs = [Port(PortKind.EDGE, node.name) for node in leaving]
        returned = [_leave(graph, copies[node]) for node in leaving]
        if self._is_last:
            outputs = [Port(PortKind.RESULT, str(position)) for position in range(len(self._capture.results))]
            returned = [
                self._result(graph, copies[node], position) for position, node in enumerate(self._capture.results)
            ]
        graph.output(tuple(returned))
        module = lazy_graph_module(self._capture.module, graph)
        return StageGraph(self._stage, module, tuple(placeholders), tuple(outputs))

    def _result(self, graph: fx.Graph, node: fx.Node, position: int) -> fx.Node:
        """Only the loss is differentiated; other results leave detached."""
        if position == self._capture.loss:
            return _leave(graph, node)
        detached = graph.call_method("detach", (node,))
        detached.meta["example_value"] = example(node).detach()
        return _leave(graph, detached)


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    placeholder = graph.placeholder(node.name)
    placeholder.meta = {"example_value": example(node), "nn_module_stack": node.meta.get("nn_module_stack", {})}
    return placeholder


def _leave(graph: fx.Graph, node: fx.Node) -> fx.Node:
    left = graph.call_function(torch.ops.fxpar.border.default, (node,))
    left.meta["example_value"] = node.meta["example_value"]
    return left
