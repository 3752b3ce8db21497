"""Let a stage change in place, instead of what another stage has computed, a copy of it.

A residual stream that a layer changes at its beginning (`x[:, 0] = 0`) is then a value like any other: the stage before
sends it, and all that comes later reads the copy.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpar._torch.compiler import storage_of
from fxpar._torch.computed import as_computed
from fxpar.graph.changes_in_place import ChangedMemory, changed_memory, tensors_of
from fxpar.graph.shared_values import recomputable
from fxpar.ir.capture import Capture, example
from fxpar.ir.example_values import add_call, value_of_call


class ChangesAcross:
    """The memory that a forward changes in place, and what of it would cross where a stage begins.

    All positions are those among the nodes of the captured graph without its placeholders.
    """

    def __init__(self, capture: Capture, repeated: Set[fx.Node]) -> None:
        """Changes in `repeated`, which are made by all stages, do not count."""
        graph = capture.module.graph
        self.nodes = [node for node in graph.nodes if node.op != "placeholder"]
        self.place = {node: position for position, node in enumerate(self.nodes)}
        given = {*capture.sources, *graph.find_nodes(op="get_attr")}
        self._memories = {memory: memory.stretch(self.place) for memory in changed_memory(graph.nodes, given, repeated)}
        self._without_grad = _without_grad(self.nodes)

    def forbids(self, at: int) -> bool:
        """Whether no stage can begin at a position: one side would not see what the other one changes."""
        return not all(self._can_be_copied(memory, at) for memory in self._around(at))

    def to_copy(self, at: int) -> list[fx.Node]:
        """What a stage that begins at a position is to copy; of each memory it is the only view that enters."""
        found = [memory for memory in self._around(at) if self._can_be_copied(memory, at)]
        return [view for memory in found for view in self._crossing(memory, at)]

    def _around(self, at: int) -> list[ChangedMemory]:
        """The memory that is used before a position and changed at or after it."""
        return [memory for memory, (first, last) in self._memories.items() if first < at <= last]

    def _can_be_copied(self, memory: ChangedMemory, at: int) -> bool:
        if memory.is_given:
            return False
        crossing = self._crossing(memory, at)
        loses_gradient = at in self._without_grad and any(example(view).requires_grad for view in crossing)
        return len(crossing) <= 1 and not loses_gradient

    def _crossing(self, memory: ChangedMemory, at: int) -> list[fx.Node]:
        """The nodes with views that are before a position, and are read at or after it."""
        before = [view for view in memory.views if self.place.get(view, -1) < at]
        return [view for view in before if any(self.place[user] >= at for user in view.users)]


def _without_grad(nodes: Sequence[fx.Node]) -> set[int]:
    """The positions before which an operation has turned gradients off."""
    found, is_off = set[int](), False
    for position, node in enumerate(nodes):
        if is_off:
            found.add(position)
        if node.target is torch._C._set_grad_enabled:
            is_off = not node.args[0]
    return found


def copy_changed_edges(capture: Capture, starts: Sequence[int]) -> tuple[Capture, Set[fx.Node]]:
    """The capture in which a stage that would change what enters it begins with a copy, and these copies.

    Before: stage 0: `x = linear(h, w)`; stage 1: `x[:, 0] = 0; y = relu(x)`
    After:  stage 0: `x = linear(h, w)`; stage 1: `z = x.clone(); z[:, 0] = 0; y = relu(z)`

    Args:
        starts: the positions of the operations with which the second and later stages begin, without placeholders.
    """
    across = _changes_across(capture) if starts else None
    if across is None or not any(map(across.to_copy, starts)):
        return capture, frozenset()
    capture = capture.copied()
    nodes = [node for node in capture.module.graph.nodes if node.op != "placeholder"]
    openers = [nodes[start] for start in starts]
    copies: dict[fx.Node, fx.Node] = {}
    for opener in openers:
        across = _changes_across(capture)
        for view in across.to_copy(across.place[opener]):
            copies[view] = _copy(view, opener, across)
    capture.module.recompile()
    results = [_latest(node, copies) for node in capture.results]
    return replace(capture, results=results), set(copies.values())


def _changes_across(capture: Capture) -> ChangesAcross:
    return ChangesAcross(capture, recomputable(capture.operations(), capture.sources))


def _latest(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    while node in copies:
        node = copies[node]
    return node


def _copy(view: fx.Node, opener: fx.Node, across: ChangesAcross) -> fx.Node:
    """Let all from `opener` on read a copy of `view`, whose memory is that of its views from there on."""
    begin = across.place[opener]
    old = {storage_of(value) for value in tensors_of(view)}
    copy = add_call(opener, "clone", view)
    copy.meta["example_value"] = _with_grad_of(copy.meta["example_value"], example(view))
    view.replace_all_uses_with(copy, lambda user: user is not copy and across.place[user] >= begin)
    for node in across.nodes[begin:]:
        if any(storage_of(value) in old for value in tensors_of(node)):
            moved = value_of_call(node.target, node.args, node.kwargs)
            node.meta["example_value"] = pytree.tree_map(_with_grad_of, moved, node.meta["example_value"])
    return copy


def _with_grad_of(moved: Any, former: Any) -> Any:
    """A value in the place of a former one: a view that requires a gradient if that did."""
    if not isinstance(moved, Tensor) or moved.requires_grad == former.requires_grad:
        return moved
    return as_computed(moved) if former.requires_grad else moved.detach()
