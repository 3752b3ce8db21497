"""Compute what a branch skips, and let it have an effect only where the branch was taken."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, fx
from torch.nn import functional

from fxpar._torch.branches import value_of_branch
from fxpar._torch.compiler import assert_async, storage_of
from fxpar.errors import GraphBreakError
from fxpar.graph.changes_in_place import changed_operands, storages_mutated_later
from fxpar.graph.shared_values import is_side_effect_only
from fxpar.ir.mean_losses import arguments_by_name
from fxpar.ir.node_meta import is_of_size, known_value, source_line
from fxpar.ir.out_of_place import out_of_place
from fxpar.passes.selected_rows.conditions import Condition, truth_of
from fxpar.passes.selected_rows.found import Found
from fxpar.passes.selected_rows.rows import RowWriter

_SINGULAR = frozenset(
    f"{arc}{name}{h}" for arc in ("a", "arc") for name in ("cos", "sin", "tan") for h in ("", "h")
) | {
    *("log", "log2", "log10", "log1p", "logit", "lgamma", "digamma", "polygamma", "erfinv", "reciprocal"),
    *("sqrt", "rsqrt", "pow", "rpow", "float_power", "std", "var", "norm", "vector_norm"),
}
"""Functions of PyTorch with infinite values or derivatives, which a branch may be there to avoid."""

_DIVISIONS = {
    *("truediv", "itruediv", "div", "true_divide", "divide", "floordiv", "floor_divide", "mod", "remainder", "fmod")
}

_RUNNING = functional.batch_norm, functional.instance_norm


class Branches:
    """The branches that a node is in, the innermost last.

    Args:
        graph: as it is before the rewriting, by which branches know what memory is older than they are.
    """

    def __init__(self, graph: fx.Graph, writer: RowWriter, found: Found) -> None:
        self._writer = writer
        self._found = found
        self._open: list[tuple[Condition, int]] = []
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._ages: dict[int, int] = {}
        for node, place in self._places.items():
            if isinstance(value := known_value(node), Tensor):
                self._ages.setdefault(storage_of(value), place)
        self._shared = _changed_and_shared(graph)
        writer.condition_beside = self._taken

    def begin(self, mark: fx.Node, condition: Condition) -> None:
        """Begin a branch, at a mark, that is taken where the condition holds."""
        self._open.append((condition, self._places[mark]))

    def end(self) -> None:
        """End the innermost branch."""
        self._open.pop()

    def _taken(self, mask: fx.Node | None = None) -> fx.Node | None:
        """Whether the branches are taken, a boolean tensor without dims; None if they are wherever `mask` selects."""
        taken = [self._truth(each) for each, _ in self._open if mask is None or each.mask is not mask]
        return functools.reduce(partial(self._writer.call, torch.logical_and), taken) if taken else None

    def _truth(self, condition: Condition) -> fx.Node:
        truth = truth_of(condition, self._found, self._writer)
        if truth is None:
            raise self.refusal(condition.node)
        return truth

    def visit(self, node: fx.Node) -> None:
        """Let `node` have no effect outside of the branches that it is in, unless they are taken.

        Raises:
            GraphBreakError: it has one that is not known to be harmless.
        """
        if not self._open:
            return
        if any(map(self._is_older, changed_operands(node))):
            self._change_if(node)
        elif node.target is assert_async:
            skipped = self._writer.call(torch.logical_not, self._taken())
            node.update_arg(0, self._writer.call(torch.logical_or, node.args[0], skipped))
        elif _has_another_effect(node) or not all(map(self._is_regular, _singular_in(node))):
            raise self.refusal(node)

    def _is_older(self, changed: fx.Node) -> bool:
        """Whether the memory of a node is from before the innermost branch."""
        return self._ages.get(storage_of(known_value(changed)), 0) < self._open[-1][1]

    def _change_if(self, node: fx.Node) -> None:
        """Let a change in place of what there was before the branch be one only where the branch is taken."""
        tensor, changed = node.args[0], out_of_place(node)
        assert isinstance(tensor, fx.Node), f"{node} changes its first argument"
        if changed is not None:
            _, target, kwargs = changed
            before = self._writer.call("clone", tensor)  # autograd may keep it, and `tensor` changes
            value: object = self._writer.call(target, before, *node.args[1:], **kwargs)
        elif node.target == "copy_" and len(node.args) == 2:
            value = node.args[1]
        else:
            raise self.refusal(node)
        node.op, node.target, node.kwargs = "call_method", "copy_", {}
        node.args = tensor, self._writer.call(torch.where, self._taken(), value, tensor)

    def choose(self, node: fx.Node) -> fx.Node:
        """The value of a variable after a branch, of which `node` has both.

        Raises:
            GraphBreakError: they differ in shape or dtype; or the variable is changed in place afterwards, which
                changes what is read elsewhere if the branch is not taken.
        """
        values = [known_value(value) for value in node.all_input_nodes]
        if len({(each.dtype, each.shape) for each in values}) > 1 or node in self._shared:
            raise self.refusal(node)
        return self._writer.call(torch.where, self._taken(), *node.args)

    def _is_regular(self, node: fx.Node) -> bool:
        """Whether it has rows that are all fillers where a branch is not taken."""
        rows = self._found.rows.get(node)
        return rows is not None and self.asks_for(rows.mask)

    def asks_for(self, mask: fx.Node) -> bool:
        """Whether a branch is taken only where the mask selects something."""
        return any(condition.mask is mask for condition, _ in self._open)

    def refusal(self, node: fx.Node) -> GraphBreakError:
        """The error that `node` depends on a branch."""
        return GraphBreakError(
            f"values of tensors decide whether {node.name} is computed. What a branch skips is computed in any case, "
            "and may only change tensors, to values that are finite also where it is not taken; for others, choose by "
            "torch.where, or branch by torch.cond",
            source_line(node),
        )

    def __bool__(self) -> bool:
        return bool(self._open)


def _changed_and_shared(graph: fx.Graph) -> set[fx.Node]:
    """The values of branches that are changed in place, where one that they may be is read later, too.

    If it is that one, the change is one of what is read; `torch.where` returns another tensor.
    """
    nodes = list(graph.nodes)
    storages = {each: storage_of(value) for each in nodes if isinstance(value := known_value(each), Tensor)}
    last_read: dict[int, int] = {}
    for place, node in enumerate(nodes):
        last_read |= {storages[used]: place for used in node.all_input_nodes if used in storages}
    may_be: dict[int, set[int]] = {}
    for node in nodes:
        if node.target is value_of_branch:
            either = {storages[used] for used in node.all_input_nodes}
            may_be[storages[node]] = either.union(*(may_be.get(each, ()) for each in either))
    changed = {each for each, _ in storages_mutated_later(nodes) if each.target is value_of_branch}
    places = {node: place for place, node in enumerate(nodes)}
    return {node for node in changed if any(last_read.get(each, 0) > places[node] for each in may_be[storages[node]])}


def _has_another_effect(node: fx.Node) -> bool:
    """Whether it does something besides what it returns, as norms do that update what they have seen so far."""
    if node.target not in _RUNNING:
        return is_side_effect_only(node) and not is_of_size(node)
    given = arguments_by_name(node)
    return given.get("running_mean") is not None and bool(given.get("training", given.get("use_input_stats")))


def _singular_in(node: fx.Node) -> Sequence[fx.Node]:
    """The operands for some values of which the results of a function, or its derivatives, are infinite."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.rstrip("_")
    if name in _DIVISIONS:
        return [each for each in node.args[1:2] if isinstance(each, fx.Node)]
    is_power = name == "pow" and len(node.args) > 1 and isinstance(node.args[1], int) and node.args[1] >= 0
    return node.all_input_nodes if name in _SINGULAR and not is_power else []
