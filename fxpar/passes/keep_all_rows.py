"""Let forwards that select rows by a mask compute with all rows, so that no shape depends on the mask."""

from __future__ import annotations

import math
import operator
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from fxpar._torch.branches import begin_branch, end_branch, value_of_branch
from fxpar.environment import is_first_rank
from fxpar.errors import AllRowsWarning
from fxpar.graph.changes_in_place import changed_operands, storages_mutated_later
from fxpar.graph.describe import describe_call
from fxpar.graph.shared_values import is_random_call
from fxpar.ir.capture import Capture, example
from fxpar.ir.ctc_loss import rows_of_selected
from fxpar.ir.example_values import value_of_call
from fxpar.ir.markers import is_marker
from fxpar.ir.mean_losses import arguments_by_name
from fxpar.ir.node_meta import is_of_size, known_value, source_line
from fxpar.ir.out_of_place import write_out_of_place
from fxpar.ir.parts_of_rows import are_all_parts
from fxpar.passes.selected_rows.assignment import added, assigned, read_assignment
from fxpar.passes.selected_rows.branches import Branches
from fxpar.passes.selected_rows.calls import Made, RowCalls, refusal
from fxpar.passes.selected_rows.conditions import read_condition
from fxpar.passes.selected_rows.found import Found
from fxpar.passes.selected_rows.indexing import Index, Indexing, read_indexing, taken_indices
from fxpar.passes.selected_rows.rows import Rows, RowWriter
from fxpar.progress.phases import as_phase

_OF_CLASSES = (functional.cross_entropy, functional.nll_loss)
"""Losses that ignore rows by their targets."""

_OF_ELEMENTS = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)
"""Losses that are the mean or the sum of those of elements."""

_BY_WEIGHTS = (functional.mse_loss, functional.l1_loss)
"""Of these, the mean of weighted losses is divided by the sum of the weights, instead of their number."""

_SUMS, _MEANS = ("sum", torch.sum), ("mean", torch.mean)

_SELECTS = ("masked_select", torch.masked_select)

_JOINS = (torch.cat, torch.concat, torch.concatenate)

_FINDS = ("nonzero", torch.nonzero, torch.where, torch.argwhere, "argwhere")
"""With one argument, they return the indices of what is true."""

_MANY_MASKS = 3
"""Of one tensor: a mask and its opposite, which are common, still compute each row twice at most."""


@as_phase
def keep_all_rows(capture: Capture) -> Capture:
    """The capture without tensors of unknown shapes, which a forward makes when it selects rows by a mask.

    Where a branch skips something, as it does for masks that select nothing, that is computed, and has no effect.

    What treats each row by itself, by the sharding rules of its ops, is computed for all rows; sums and means over rows
    are those of the rows that the mask selects.

    Before: `selected = losses[mask]; loss = selected.mean()`
    After:  `rows = where(mask, losses, 0.5); loss = where(mask, rows, 0).sum() / mask.sum()`

    Raises:
        DataDependentShapeError: something else is done with the rows.
    """
    nodes = capture.module.graph.nodes
    if all(_is_of_known_shape(node) and node.target is not begin_branch for node in nodes):
        return capture
    capture = capture.copied()
    keeping = _Keeping(capture.module)
    keeping.run()
    if is_first_rank():
        keeping.warn_of_many_masks()
    return replace(capture, results=[keeping.replaced.get(node, node) for node in capture.results])


def _is_of_known_shape(node: fx.Node) -> bool:
    values = pytree.tree_leaves(known_value(node))
    return all(isinstance(size, int) for each in values if isinstance(each, Tensor) for size in each.shape)


class _Keeping:
    """The state of the rewriting.

    _marks: the nodes where branches begin and end.
    _selected: for nodes that select, what they select from, and the mask.
    _several: for nodes that have several tensors of rows, as a tuple, the call that makes these.
    _sizes: nodes that have sizes of selected rows, and assertions about them.
    _places: those of nodes in the graph.
    _changes: for nodes whose values are changed in place, where that is done last.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._writer, self._found = RowWriter(), Found()
        self._calls = RowCalls(module, self._found, self._writer)
        self._branches = Branches(module.graph, self._writer, self._found)
        self._marks: set[fx.Node] = set()
        self._selected: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self._several: dict[fx.Node, Made] = {}
        self._sizes: set[fx.Node] = set()
        self._equal: dict[str, fx.Node] = {}
        nodes = list(module.graph.nodes)
        self._places = {node: place for place, node in enumerate(nodes)}
        self._changes: dict[fx.Node, int] = {}
        for changed, mutator in storages_mutated_later(nodes):
            self._changes[changed] = max(self._changes.get(changed, 0), self._places[mutator])
        self.replaced: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        for node in list(self._module.graph.nodes):
            if node.op == "placeholder":
                self._found.first[node] = node
            else:
                self._visit(node)
        for node in reversed(self._module.graph.nodes):
            found = (self._found.rows, self._found.indices, self._found.matrices)
            gone = (*found, self._several, self._sizes, self._marks, self.replaced)
            if any(node in each for each in gone):
                self._module.graph.erase_node(node)
        write_out_of_place(self._module)

    def warn_of_many_masks(self) -> None:
        """Warn if so many masks select rows of a tensor that computing all rows for each is a waste."""
        selections: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
        for node, (source, mask) in self._selected.items():
            selections.setdefault(source, {})[mask] = node
        most = max(selections.values(), key=len, default={})
        if len(most) >= _MANY_MASKS:
            node = next(iter(most.values()))
            rows = self._found.rows[node]
            num_rows = example(rows.node).shape[rows.dim]
            warnings.warn(AllRowsWarning(len(most), num_rows, source_line(node)), stacklevel=2)

    def _visit(self, node: fx.Node) -> None:
        self._writer.before = node
        self._found.first[node] = self._first_like(node)
        if node.target in (begin_branch, end_branch):
            self._marks.add(node)
            self._begin(node) if node.target is begin_branch else self._branches.end()
            return
        if node.target is value_of_branch:
            self._choose(node)
            return
        selection = self._selection(node)
        if selection is not None:
            source, by = selection
            self._selected[node] = source, by.mask
            self._found.rows[node] = self._writer.select(source, by)
        elif not (self._finds(node) or self._assigns(node)):
            self._branches.visit(node)
            self._use(node)

    def _begin(self, mark: fx.Node) -> None:
        condition, holds = mark.args
        assert isinstance(condition, fx.Node) and isinstance(holds, bool), f"{mark} begins a branch"
        self._branches.begin(mark, read_condition(condition, holds, self._found))

    def _choose(self, node: fx.Node) -> None:
        if any(used in self._found.rows for used in node.all_input_nodes):
            raise refusal(node)
        self._replace(node, self._branches.choose(node))

    def _use(self, node: fx.Node) -> None:
        """Rewrite what takes selected rows, but neither selects nor assigns any."""
        given = node.all_input_nodes
        if node.target in _JOINS and self._joins(node):
            return
        if any(used in self._sizes or used in self._found.indices or used in self._found.matrices for used in given):
            self._note_size(node)
        elif node.target is operator.getitem and given[0] in self._several:
            self._found.rows[node] = self._calls.taken(node, self._several[given[0]])
        elif any(used in self._found.rows for used in given):
            if is_marker(node, "exit") or changed_operands(node):
                raise refusal(node)
            if isinstance(known_value(node), Tensor):
                self._compute(node)
            elif isinstance(known_value(node), tuple | list):
                self._several[node] = self._calls.make(node, node.args, node.kwargs, self._calls.dims_of(node))
            else:
                self._note_size(node)
        elif not _is_of_known_shape(node):
            self._compute_again(node)

    def _compute_again(self, node: fx.Node) -> None:
        """Note the value of a node whose inputs have been given known shapes."""
        if not node.all_input_nodes or not all(map(_is_of_known_shape, node.all_input_nodes)):
            raise refusal(node)
        try:
            node.meta["example_value"] = value_of_call(node.target, node.args, node.kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise refusal(node) from error
        if not _is_of_known_shape(node):
            raise refusal(node)

    def _joins(self, node: fx.Node) -> bool:
        """Rewrite a call that joins the rows of all parts of a tensor, if `node` is one."""
        parts = node.args[0] if node.args else node.kwargs["tensors"]
        assert isinstance(parts, tuple | list), f"{node} joins several tensors"
        rows = [self._found.rows[part] for part in parts if isinstance(part, fx.Node) and part in self._found.rows]
        if len(rows) < len(parts) or not are_all_parts([each.mask for each in rows]):
            return False
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        assert isinstance(dim, int), f"{node} joins along a dim"
        if any(each.dim != dim % example(each.node).dim() for each in rows):
            return False
        found = rows[-1].node
        for each in rows[:-1]:
            found = self._writer.call(torch.where, self._writer.places(each), each.node, found)
        self._replace(node, found)
        return True

    def _first_like(self, node: fx.Node) -> fx.Node:
        """The first node that has the same value as `node`, which no op changes in place."""
        given = node.all_input_nodes
        if is_random_call(node) or not given or any(each in self._changes for each in (node, *given)):
            return node
        names = {used: self._found.first_of(used).name for used in given}
        return self._equal.setdefault(f"{node.op} {describe_call(node, names)}", node)

    def _note_size(self, node: fx.Node) -> None:
        """Sizes of selected rows may be asserted, by Dynamo, but not be used."""
        if not is_of_size(node):
            raise refusal(node)
        self._sizes.add(node)

    def _selection(self, node: fx.Node) -> tuple[fx.Node, Indexing] | None:
        """The tensor of which `node` selects rows or elements, and by what."""
        if node.target not in (*_SELECTS, operator.getitem) or len(node.args) != 2:
            return None
        source, index = node.args
        if not isinstance(source, fx.Node) or source in self._found.rows:
            return None
        by = read_indexing(source, index, self._found.indices, self._found.first)
        if by is not None and self._changes.get(by.mask, 0) > self._places[node]:
            raise refusal(node)  # what is computed of the rows later would read another mask
        is_whole = by is not None and len(by.dims) == example(source).dim()
        return (source, by) if by is not None and (is_whole or node.target not in _SELECTS) else None

    def _finds(self, node: fx.Node) -> bool:
        """Note what indices of the places of a mask `node` has, if it has any."""
        if node.target in _FINDS and len(node.all_input_nodes) == 1 and len(node.args) == 1:
            mask = self._found.first_of(node.all_input_nodes[0])
            if isinstance(known_value(node), tuple):
                self._found.indices[node] = tuple(Index(mask, dim) for dim in range(example(mask).dim()))
            else:
                self._found.matrices[node] = mask
            return True
        taken = taken_indices(node, self._found.indices, self._found.matrices)
        if taken:
            self._found.indices[node] = taken
        return bool(taken)

    def _assigns(self, node: fx.Node) -> bool:
        """Rewrite an assignment to places of a mask, or an addition to them, if `node` is one."""
        call = read_assignment(node)
        if call is None or call.tensor in self._found.rows:
            return False
        at = read_indexing(call.tensor, call.index, self._found.indices, self._found.first)
        values = self._found.rows.get(call.values, call.values) if isinstance(call.values, fx.Node) else call.values
        if at is None or not (isinstance(values, Rows) or (_is_number(values) and not call.adds)):
            return False
        if call.adds:
            assert isinstance(values, Rows), "numbers are not added"
            found = added(self._writer, call.tensor, at, values)
        else:
            found = assigned(self._writer, call.tensor, at, values)
        if found is None:
            raise refusal(node)
        node.op, node.kwargs = "call_method", {"alpha": call.alpha} if call.alpha != 1 else {}
        node.target = ("add" if call.adds else "copy") + ("_" if call.in_place else "")
        node.args = call.tensor, found
        node.meta["example_value"] = example(call.tensor)
        if node.target == "copy":
            self._replace(node, found)
        return True

    def _compute(self, node: fx.Node) -> None:
        """Compute what `node` does with selected rows from all rows."""
        is_whole = len(node.args) == 1 and not node.kwargs
        dims = self._calls.dims_of(node)
        if node.target in _OF_CLASSES:
            self._loss_of_classes(node, dims)
        elif node.target is torch.ops.fxpar.ctc_losses:
            self._give_targets_in_rows(node)
        elif node.target in _OF_ELEMENTS:
            given = arguments_by_name(node)
            losses = self._calls.on_rows(node, (), given | {"reduction": "none"}, dims)
            by_weights = given.get("weight") is not None and node.target in _BY_WEIGHTS
            self._settle(node, losses, given["reduction"], given["weight"] if by_weights else None)
        elif is_whole and node.target in (*_SUMS, *_MEANS):
            self._settle(node, self._found.rows[node.all_input_nodes[0]], "mean" if node.target in _MEANS else "sum")
        else:
            self._found.rows[node] = self._calls.on_rows(node, node.args, node.kwargs, dims)

    def _loss_of_classes(self, node: fx.Node, dims: tuple[int, ...]) -> None:
        """Rows that are not kept have a target that is ignored."""
        given = arguments_by_name(node)
        scores, targets = self._found.rows.get(given["input"]), self._found.rows.get(given["target"])
        if scores is None or targets is None or example(targets.node).dim() > 1 or scores.dim != 0:
            raise refusal(node)
        scores, targets = (self._writer.expanded(each, dims) for each in (scores, targets))
        ignored = self._writer.masked(targets, given["ignore_index"])
        with_ignored = given | {"input": scores.node, "target": ignored}
        losses = self._writer.call(node.target, **with_ignored)
        if given["reduction"] == "none":
            self._found.rows[node] = replace(targets, node=losses)
        elif given["reduction"] == "mean" and self._branches:
            counts = self._writer.call("sum", self._writer.call(operator.ne, ignored, given["ignore_index"]))
            if given.get("weight") is not None:
                raise self._branches.refusal(node)
            number = self._number_of_rows(node, counts, targets.mask)
            total = self._writer.call(node.target, **{**with_ignored, "reduction": "sum"})
            self._replace(node, self._writer.call(operator.truediv, total, number))
        else:
            self._replace(node, losses)

    def _give_targets_in_rows(self, node: fx.Node) -> None:
        """Let targets that a mask selects from a matrix stay in its rows, for which the lengths count them."""
        targets = node.args[1]
        labels, mask = self._selected.get(targets, (None, None)) if isinstance(targets, fx.Node) else (None, None)
        if labels is None or mask is None or not example(labels).dim() == example(mask).dim() == 2:
            raise refusal(node)
        node.update_arg(1, self._writer.call(rows_of_selected, labels, mask))

    def _settle(self, node: fx.Node, rows: Rows, reduction: str, weights: fx.Node | None = None) -> None:
        """Let `rows`, reduced over those that are kept, take the place of `node`; a mean may have weights of rows."""
        if reduction == "none":
            self._found.rows[node] = rows
            return
        rows = self._writer.expanded(rows, tuple(range(example(rows.mask).dim())))
        found = self._writer.call("sum", self._writer.masked(rows, 0))
        if reduction == "mean" and weights is not None:
            if weights not in self._found.rows or self._branches:
                raise refusal(node)
            weights_of_rows = self._writer.expanded(self._found.rows[weights], rows.dims)
            total = self._writer.call("sum", self._writer.masked(weights_of_rows, 0))
            found = self._writer.call(operator.truediv, found, total)
        elif reduction == "mean":
            shape = example(rows.node).shape
            keep = self._writer.keep(rows.mask, rows.dims)
            number = self._number_of_rows(node, self._writer.call("sum", keep), rows.mask)
            number = self._writer.call(operator.mul, number, math.prod(shape) // shape[rows.dim])
            found = self._writer.call(operator.truediv, found, number)
        self._replace(node, found)

    def _number_of_rows(self, node: fx.Node, number: fx.Node, mask: fx.Node) -> fx.Node:
        """What the mean over rows is divided by: in a branch that is not taken where there are none, at least one."""
        if not self._branches:
            return number
        if not self._branches.asks_for(mask):
            raise self._branches.refusal(node)
        return self._writer.call("clamp", number, min=1)

    def _replace(self, node: fx.Node, found: fx.Node) -> None:
        node.replace_all_uses_with(found)
        self.replaced[node] = found


def _is_number(value: Any) -> bool:
    """Whether it is a number, also one on a tensor."""
    if isinstance(value, fx.Node):
        value = known_value(value)
        return isinstance(value, Tensor) and value.dim() == 0
    return isinstance(value, int | float)
