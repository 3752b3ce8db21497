"""Find what a forward changes in place of what outlives it, and how its new value is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar._torch.compiler import FakeTensor, get_data, make_fx, set_tensor_requires_grad, storage_of
from fxpar.graph.changes_in_place import changed_operands
from fxpar.graph.shared_values import is_random_call
from fxpar.ir.capture import Capture
from fxpar.ir.changes import Change
from fxpar.ir.node_meta import known_value, where
from fxpar.ir.stage import Port, PortKind

aten = torch.ops.aten

_OF_EQUAL_SHAPE = {aten.clone, aten.copy, aten.detach, aten.alias, aten._to_copy, aten.full_like, aten.zeros_like}

_KEEPS_VALUES = {"requires_grad_", "detach_", set_tensor_requires_grad}


class LastingChanges:
    """Which nodes of a captured forward have the memory of a source of some kind, and which change it.

    order: the nodes; place: their positions.
    of: the source whose memory a node's value is in; a parameter may be read at several nodes.
    changes: the nodes that change each source.
    """

    def __init__(self, capture: Capture, kind: PortKind) -> None:
        self._sources = capture.sources
        self.order: list[fx.Node] = list(capture.module.graph.nodes)
        self.place = {node: place for place, node in enumerate(self.order)}
        self.of: dict[fx.Node, Port] = {}
        self.changes: dict[Port, list[fx.Node]] = {}
        memory: dict[int, Port] = {}
        for node in self.order:
            port = self._source_of(node, kind, memory)
            if port is not None:
                self.of[node] = memory[storage_of(known_value(node))] = port
            for port in dict.fromkeys(self.of[each] for each in self.operands(node) if each in self.of):
                self.changes.setdefault(port, []).append(node)

    def _source_of(self, node: fx.Node, kind: PortKind, memory: Mapping[int, Port]) -> Port | None:
        if not isinstance(known_value(node), torch.Tensor):
            return None
        if node in self._sources:
            return self._sources[node] if self._sources[node].kind is kind else None
        if node.target in (get_data, "detach"):
            return self.of.get(node.all_input_nodes[0])
        return memory.get(storage_of(known_value(node)))

    def operands(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The operands whose values `node` changes."""
        return () if node.target in _KEEPS_VALUES else changed_operands(node)

    def last(self, port: Port) -> fx.Node:
        """The last change of a source."""
        return self.changes[port][-1]

    def closure(self, port: Port) -> set[fx.Node]:
        """The changes of a source, and all that they are computed of."""
        found: set[fx.Node] = set()
        wanted = list(self.changes[port])
        while wanted:
            node = wanted.pop()
            if node in found:
                continue
            found.add(node)
            if node not in self._sources:
                wanted += node.all_input_nodes
                wanted += self._changes_before(node)
        return found

    def _changes_before(self, node: fx.Node) -> Iterator[fx.Node]:
        """The changes that what a node reads has seen."""
        for port in (self.of[used] for used in node.all_input_nodes if used in self.of):
            yield from (change for change in self.changes.get(port, ()) if self.place[change] < self.place[node])

    def sources_in(self, closure: set[fx.Node]) -> set[Port | None]:
        """The sources that a closure begins with; None stands for what is none: constant tensors and random numbers."""
        given = {node for node in closure if node.op in ("placeholder", "get_attr") or is_random_call(node)}
        return {self._sources.get(node) for node in closure if node in self._sources or node in given}

    def change(self, port: Port, closure: set[fx.Node]) -> Change:
        """How the new value of a source is computed, by the nodes of its closure."""
        order = [node for node in self.order if node in closure]
        values = {self._sources[node]: known_value(node) for node in order if node in self._sources}
        reads = sorted(values, key=lambda each: each != port)  # the one that changes comes first
        graph = fx.Graph()
        given = [graph.placeholder(f"{each.kind.value}_{place}") for place, each in enumerate(reads)]
        clones = {each: graph.call_method("clone", (taken,)) for each, taken in zip(reads, given, strict=True)}
        copies = {node: clones[self._sources[node]] for node in order if node in self._sources}
        for node in order:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                if node.target is get_data:  # which hides later changes from functionalization
                    copies[node].op, copies[node].target = "call_method", "detach"
        graph.output(clones[port])
        module = _functional(graph, [values[each].detach() for each in reads])
        return Change(port, tuple(reads), module, where(self.last(port)), _is_pointwise(module.graph))


def _is_pointwise(graph: fx.Graph) -> bool:
    """Whether all values of an ATen graph have one shape, and each element depends on those at its place alone."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    called: list[Any] = [node.target for node in nodes if node.op == "call_function"]
    return (
        all(node.op in ("placeholder", "call_function") for node in nodes)
        and len({known_value(node).shape for node in nodes}) == 1
        and all(torch.Tag.pointwise in each.tags or each.overloadpacket in _OF_EQUAL_SHAPE for each in called)
    )


def _functional(graph: fx.Graph, examples: Sequence[Any]) -> fx.GraphModule:
    """The ATen graph that computes the same, without changes in place."""
    mode = next(value.fake_mode for value in examples if isinstance(value, FakeTensor))
    with mode, torch.no_grad():
        traced: fx.GraphModule = make_fx(torch.func.functionalize(fx.GraphModule({}, graph)))(*examples)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced
