"""Take changes of parameters in place, such as clamping them, out of a forward: they are made once, before each step.

A stage runs once per microbatch, and its graph takes parameters gathered, in another dtype or from another stage. So
what a forward does to a parameter itself is taken out of its graph, and runs before the first microbatch. That computes
the same if nothing has read the parameter before, and if the new value depends on no argument and no buffer; and if it
is pointwise, a rank changes its shard alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar._torch.compiler import (
    FakeTensor,
    get_data,
    make_fx,
    set_tensor_requires_grad,
    storage_of,
)
from fxpar.errors import UnsupportedGraphError
from fxpar.graph.shared_values import is_context, is_random_call, mutated
from fxpar.ir.capture import Capture
from fxpar.ir.node_meta import known_value, where
from fxpar.ir.parameter_changes import ParameterChange
from fxpar.ir.stage import PortKind
from fxpar.progress.phases import as_phase

aten = torch.ops.aten

_OF_EQUAL_SHAPE = {aten.clone, aten.copy, aten.detach, aten.alias, aten._to_copy, aten.full_like, aten.zeros_like}
_KEEPS_VALUES = {"requires_grad_", "detach_", set_tensor_requires_grad}


@as_phase
def take_out_parameter_changes(capture: Capture) -> Capture:
    """The capture without changes of parameters in place, which are among its `changes` instead.

    Before: `w = param(...); w.detach().clamp_(-1, 1); y = linear(x, w)`
    After:  `w = param(...); y = linear(x, w)`, and the change `w -> clamp(w, -1, 1)`

    Raises:
        UnsupportedGraphError: the new value depends on something else than parameters and constants, or is not computed
            element by element; or the parameter is read before it is changed.
    """
    if not _Reading(capture).changes:
        return capture
    capture = capture.copied()
    reading = _Reading(capture)
    closures = {name: reading.closure(name) for name in reading.changes}
    every = set().union(*closures.values())
    reading.check_reads(every)
    changes = tuple(_change(name, reading, closure) for name, closure in closures.items())
    replaced = reading.remove(every)
    return replace(capture, changes=changes, results=[replaced.get(node, node) for node in capture.results])


class _Reading:
    """Which nodes of a graph have the memory of a parameter, and which change it."""

    def __init__(self, capture: Capture) -> None:
        self._module = capture.module
        self.sources = {node: port.name for node, port in capture.sources.items() if port.kind is PortKind.PARAMETER}
        self.order: list[fx.Node] = list(capture.module.graph.nodes)
        self.place = {node: place for place, node in enumerate(self.order)}
        self.of: dict[fx.Node, str] = {}
        """The parameter whose memory a node's value is in."""
        self.changes: dict[str, list[fx.Node]] = {}
        by_storage: dict[int, str] = {}
        for node in self.order:
            name = self._parameter_of(node, by_storage)
            if name is not None:
                self.of[node] = name
                by_storage[storage_of(known_value(node))] = name
            if (base := self.base(node)) in self.of:
                self.of[node] = self.of[base]
                self.changes.setdefault(self.of[base], []).append(node)

    def _parameter_of(self, node: fx.Node, by_storage: Mapping[int, str]) -> str | None:
        if not isinstance(known_value(node), torch.Tensor):
            return None
        if node in self.sources:
            return self.sources[node]
        if node.target in (get_data, "detach"):
            return self.of.get(node.all_input_nodes[0])
        used = (self.of.get(each) for each in node.all_input_nodes)
        return next(used, None) if storage_of(known_value(node)) in by_storage else None

    def base(self, node: fx.Node) -> fx.Node | None:
        """The operand whose values `node` changes."""
        return None if is_context(node) or node.target in _KEEPS_VALUES else mutated(node)

    def closure(self, name: str) -> set[fx.Node]:
        """The changes of a parameter, and all that they are computed of.

        Raises:
            UnsupportedGraphError: they depend on an argument, a buffer or random numbers.
        """
        found: set[fx.Node] = set()
        wanted = list(self.changes[name])
        while wanted:
            node = wanted.pop()
            if node in found:
                continue
            if node.op in ("placeholder", "get_attr") or is_random_call(node):
                raise _unsupported(self.changes[name][-1], name, "its new value depends on more than parameters")
            found.add(node)
            if node not in self.sources:
                wanted += node.all_input_nodes
                wanted += self._changes_before(node)
        return found

    def _changes_before(self, node: fx.Node) -> Iterator[fx.Node]:
        """The changes that what a node reads has seen."""
        for name in {self.of[used] for used in node.all_input_nodes if used in self.of}:
            yield from (change for change in self.changes.get(name, ()) if self.place[change] < self.place[node])

    def check_reads(self, closure: set[fx.Node]) -> None:
        """Check that nothing but `closure` has read a parameter before it is changed for the last time.

        Raises:
            UnsupportedGraphError: something has.
        """
        kept = {node for node in self.order if node not in closure}
        for node in reversed(self.order):
            if node in closure and self.base(node) is None and any(user in kept for user in node.users):
                kept.add(node)
        for node in self.order:
            if node in kept and node not in self.of:
                for used in node.all_input_nodes:
                    last = self.changes.get(self.of.get(used, ""), [node])[-1]
                    if self.place[node] < self.place[last]:
                        raise _unsupported(last, self.of[used], f"{where(node)} has read it before")

    def remove(self, closure: set[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Remove the changes, and what nothing else needs of the rest of `closure`.

        Returns the nodes that take the places of the changes.
        """
        replaced: dict[fx.Node, fx.Node] = {}
        for node in self.order:
            if node in closure and (base := self.base(node)) is not None:
                replaced[node] = replaced.get(base, base)
                node.replace_all_uses_with(replaced[node])
        for node in reversed(self.order):
            if node in closure and node not in self.sources and not node.users:
                self._module.graph.erase_node(node)
        self._module.recompile()
        return replaced


def _change(name: str, reading: _Reading, closure: set[fx.Node]) -> ParameterChange:
    """The change of one parameter, by the nodes of `closure`.

    Raises:
        UnsupportedGraphError: it is not pointwise.
    """
    order = [node for node in reading.order if node in closure]
    values = {reading.sources[node]: known_value(node) for node in order if node in reading.sources}
    names = sorted(values, key=lambda each: each != name)  # the one that changes comes first
    graph = fx.Graph()
    given = [graph.placeholder(f"parameter_{place}") for place in range(len(names))]
    clones = {each: graph.call_method("clone", (taken,)) for each, taken in zip(names, given, strict=True)}
    copies = {node: clones[reading.sources[node]] for node in order if node in reading.sources}
    for node in order:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.target is get_data:  # which hides later changes from functionalization
                copies[node].op, copies[node].target = "call_method", "detach"
    graph.output(clones[name])
    examples = [values[each].detach() for each in names]
    mode = next(value.fake_mode for value in examples if isinstance(value, FakeTensor))
    with mode, torch.no_grad():
        traced = make_fx(torch.func.functionalize(fx.GraphModule({}, graph)))(*examples)
    last = reading.changes[name][-1]
    _check_pointwise(traced, last, name, examples[0].shape)
    return ParameterChange(name, tuple(names), traced, where(last))


def _check_pointwise(traced: fx.GraphModule, change: fx.Node, name: str, shape: Sequence[int]) -> None:
    traced.graph.eliminate_dead_code()
    for node in traced.graph.nodes:
        operands = [*node.all_input_nodes, node] if node.op == "call_function" else []
        target: Any = node.target
        is_pointwise = not operands or torch.Tag.pointwise in target.tags or target.overloadpacket in _OF_EQUAL_SHAPE
        if not is_pointwise or any(known_value(each).shape != shape for each in operands):
            raise _unsupported(change, name, f"{target} does not compute its new value element by element")


def _unsupported(change: fx.Node, name: str, reason: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"{where(change)} changes parameter {name} in place, and {reason}: expected changes that depend on parameters "
        "alone, element by element, before the forward reads them; write the operation out of place, or change "
        "parameters between steps"
    )
