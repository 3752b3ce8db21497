"""Let forwards that select rows by a mask compute with all rows, so that no shape depends on the mask."""

from __future__ import annotations

import math
import operator
from collections.abc import Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from fxpar.errors import DataDependentShapeError
from fxpar.graph.describe import describe_call
from fxpar.graph.shared_values import is_random_call, mutated, storages_mutated_later
from fxpar.ir.capture import Capture, example
from fxpar.ir.ctc_loss import rows_of_selected
from fxpar.ir.example_values import value_of_call
from fxpar.ir.layout import Shard
from fxpar.ir.markers import is_marker
from fxpar.ir.mean_losses import arguments_by_name
from fxpar.ir.node_meta import is_of_size, known_value, source_line
from fxpar.passes.decompose.follow_samples import follow_samples
from fxpar.passes.trace_part import trace_part
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

_SUMS, _MEANS = ("sum", torch.sum), ("mean", torch.mean)

_FILLER = 0.5
"""What rows have that a mask leaves out: in the domain of most functions, so that no gradient is NaN."""


@as_phase
def keep_all_rows(capture: Capture) -> Capture:
    """The capture without tensors of unknown shapes, which a forward makes when it selects rows by a mask.

    What treats each row by itself, by the sharding rules of its ops, is computed for all rows; sums and means over rows
    are those of the rows that the mask selects.

    Before: `selected = losses[mask]; loss = selected.mean()`
    After:  `rows = where(mask, losses, 0.5); loss = where(mask, rows, 0).sum() / mask.sum()`

    Raises:
        DataDependentShapeError: something else is done with the rows.
    """
    if all(map(_is_of_known_shape, capture.module.graph.nodes)):
        return capture
    capture = capture.copied()
    keeping = _Keeping(capture.module)
    keeping.run()
    return replace(capture, results=[keeping.replaced.get(node, node) for node in capture.results])


def _is_of_known_shape(node: fx.Node) -> bool:
    value = known_value(node)
    return not isinstance(value, Tensor) or all(isinstance(size, int) for size in value.shape)


class _Keeping:
    """The state of the rewriting.

    _rows: for nodes that have selected rows, the node that has all rows, and the mask.
    _selected: for nodes that select, what they select from, and the mask.
    _indices: for nodes that have the indices of the rows that a mask selects, that mask.
    _sizes: nodes that have sizes of selected rows, and assertions about them.
    _keep: masks as vectors, which say which rows are kept.
    _first: for each node the first one that has the same value, as masks have that are computed twice.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._rows: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self._indices: dict[fx.Node, fx.Node] = {}
        self._selected: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self._sizes: set[fx.Node] = set()
        self._keep: dict[fx.Node, fx.Node] = {}
        self._equal: dict[str, fx.Node] = {}
        self._first: dict[fx.Node, fx.Node] = {}
        self._changed = {changed for changed, _ in storages_mutated_later(list(module.graph.nodes))}
        self._before: fx.Node
        self.replaced: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        for node in list(self._module.graph.nodes):
            if node.op != "placeholder":
                self._visit(node)
        for node in reversed(self._module.graph.nodes):
            if any(node in gone for gone in (self._rows, self._indices, self._sizes, self.replaced)):
                self._module.graph.erase_node(node)
        self._module.recompile()

    def _visit(self, node: fx.Node) -> None:
        self._before = node
        self._first[node] = self._first_like(node)
        selection = self._selection(node)
        if selection is not None:
            self._selected[node] = selection
            self._rows[node] = self._select(*selection)
        elif (mask := self._counted(node)) is not None:
            self._indices[node] = mask
        elif any(used in self._sizes or used in self._indices for used in node.all_input_nodes):
            self._note_size(node)
        elif any(used in self._rows for used in node.all_input_nodes):
            if node.target is operator.setitem:
                self._assign(node)
            elif isinstance(known_value(node), Tensor) and not is_marker(node, "exit") and mutated(node) is None:
                self._compute(node)
            else:
                self._note_size(node)
        elif not _is_of_known_shape(node):
            raise self._refusal(node)

    def _first_like(self, node: fx.Node) -> fx.Node:
        """The first node that has the same value as `node`, which no op changes in place."""
        given = node.all_input_nodes
        if is_random_call(node) or not given or self._changed.intersection([node, *given]):
            return node
        names = {used: self._first.get(used, used).name for used in given}
        return self._equal.setdefault(f"{node.op} {describe_call(node, names)}", node)

    def _note_size(self, node: fx.Node) -> None:
        """Sizes of selected rows may be asserted, by Dynamo, but not be used."""
        if not is_of_size(node):
            raise self._refusal(node)
        self._sizes.add(node)

    def _refusal(self, node: fx.Node) -> DataDependentShapeError:
        return DataDependentShapeError(node.name, source_line(node))

    def _selection(self, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """The tensor of which `node` selects rows or elements, and the mask."""
        if node.target not in ("masked_select", torch.masked_select, operator.getitem) or len(node.args) != 2:
            return None
        source, mask = node.args
        mask = mask[0] if isinstance(mask, tuple) and len(mask) == 1 else mask
        mask = self._indices.get(mask, mask) if isinstance(mask, fx.Node) else mask
        if not (isinstance(source, fx.Node) and isinstance(mask, fx.Node)) or source in self._rows:
            return None
        values = known_value(source), known_value(mask)
        if not all(isinstance(value, Tensor) for value in values) or values[1].dtype != torch.bool:
            return None
        return (source, self._first[mask]) if values[0].shape[: values[1].dim()] == values[1].shape else None

    def _counted(self, node: fx.Node) -> fx.Node | None:
        """The mask of which `node` has the indices of the true rows, or a tuple of these."""
        given = node.all_input_nodes
        if node.target is operator.getitem and node.args[1] == 0 and given and given[0] in self._indices:
            return self._indices[given[0]]
        is_tuple = node.target in ("nonzero", torch.nonzero) and node.kwargs.get("as_tuple") is True
        if len(given) == 1 and (is_tuple or (node.target is torch.where and len(node.args) == 1)):
            value = known_value(given[0])
            return self._first[given[0]] if value.dim() == 1 and value.dtype == torch.bool else None
        return None

    def _select(self, source: fx.Node, mask: fx.Node) -> tuple[fx.Node, fx.Node]:
        dims = example(mask).dim()
        rows = source if dims == 1 else self._call("flatten", source, 0, dims - 1)
        if mask not in self._keep:
            self._keep[mask] = mask if dims == 1 else self._call("flatten", mask, 0, dims - 1)
        keep = self._keep[mask]
        dtype = example(source).dtype
        return self._where(keep, rows, _FILLER if dtype.is_floating_point else dtype == torch.bool), keep

    def _where(self, keep: fx.Node, rows: fx.Node, other: float) -> fx.Node:
        """The rows, with `other` in the place of those that are not kept."""
        places = self._call(operator.getitem, keep, (..., *[None] * (example(rows).dim() - 1)))
        value = example(rows)
        filler = bool(other) if value.dtype == torch.bool else other if value.is_floating_point() else int(other)
        return self._call("where", rows, places, filler)

    def _compute(self, node: fx.Node) -> None:
        """Compute what `node` does with selected rows from all rows."""
        masks = {self._rows[used][1] for used in node.all_input_nodes if used in self._rows}
        if len(masks) > 1:
            raise self._refusal(node)
        keep, whole = masks.pop(), len(node.args) == 1 and not node.kwargs
        if node.target in _OF_CLASSES:
            self._loss_of_classes(node, keep)
        elif node.target is torch.ops.fxpar.ctc_losses:
            self._give_targets_in_rows(node)
        elif node.target in _OF_ELEMENTS:
            given = arguments_by_name(node)
            losses = self._on_rows(node, (), given | {"reduction": "none"}, keep)
            self._settle(node, losses, keep, given["reduction"])
        elif whole and node.target in (*_SUMS, *_MEANS):
            rows, _ = self._rows[node.all_input_nodes[0]]
            self._settle(node, rows, keep, "mean" if node.target in _MEANS else "sum")
        else:
            self._settle(node, self._on_rows(node, node.args, node.kwargs, keep), keep, "none")

    def _assign(self, node: fx.Node) -> None:
        """Assign the selected rows of `values` to those of the tensor: `tensor[mask] = values`."""
        tensor, mask, values = node.args
        if tensor in self._rows or mask not in self._first or values not in self._rows:
            raise self._refusal(node)
        assert isinstance(tensor, fx.Node) and isinstance(mask, fx.Node) and isinstance(values, fx.Node)
        rows, keep = self._rows[values]
        assigned = example(tensor)
        if self._keep.get(self._first[mask]) is not keep or rows.meta["example_value"].numel() != assigned.numel():
            raise self._refusal(node)
        whole = self._call("reshape", rows, tuple(assigned.shape))
        places = self._call(operator.getitem, mask, (..., *[None] * (assigned.dim() - example(mask).dim())))
        node.op, node.target = "call_method", "copy_"
        node.args = tensor, self._call(torch.where, places, whole, tensor)

    def _loss_of_classes(self, node: fx.Node, keep: fx.Node) -> None:
        """Rows that are not kept have a target that is ignored."""
        given = arguments_by_name(node)
        if given["target"] not in self._rows or given["input"] not in self._rows or example(given["target"]).dim() > 1:
            raise self._refusal(node)
        (scores, _), (targets, _) = self._rows[given["input"]], self._rows[given["target"]]
        given |= {"input": scores, "target": self._where(keep, targets, given["ignore_index"])}
        losses = self._call(node.target, **given)
        if given["reduction"] == "none":
            self._rows[node] = losses, keep
        else:
            self._replace(node, losses)

    def _give_targets_in_rows(self, node: fx.Node) -> None:
        """Let targets that a mask selects from a matrix stay in its rows, for which the lengths count them."""
        targets = node.args[1]
        labels, mask = self._selected.get(targets, (None, None)) if isinstance(targets, fx.Node) else (None, None)
        if labels is None or mask is None or not example(labels).dim() == example(mask).dim() == 2:
            raise self._refusal(node)
        node.update_arg(1, self._call(rows_of_selected, labels, mask))

    def _on_rows(self, node: fx.Node, args: Any, kwargs: Any, keep: fx.Node) -> fx.Node:
        """The call of `node` with these arguments, on all rows in place of the selected ones.

        Raises:
            DataDependentShapeError: it does not treat each row by itself.
        """
        args, kwargs = fx.map_arg((args, dict(kwargs)), lambda used: self._rows.get(used, (used,))[0])
        try:
            made = self._call(node.target, *args, **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise self._refusal(node) from error
        of_rows = {rows for rows, _ in self._rows.values()}
        if not _treats_each_by_itself(self._module, made, of_rows, example(keep).shape[0]):
            raise self._refusal(node)
        return made

    def _settle(self, node: fx.Node, rows: fx.Node, keep: fx.Node, reduction: str) -> None:
        """Let `rows`, reduced over those that are kept, take the place of `node`."""
        if reduction == "none":
            self._rows[node] = rows, keep
            return
        found = self._call("sum", self._where(keep, rows, 0))
        if reduction == "mean":
            number = self._call(operator.mul, self._call("sum", keep), math.prod(example(rows).shape[1:]))
            found = self._call(operator.truediv, found, number)
        self._replace(node, found)

    def _replace(self, node: fx.Node, found: fx.Node) -> None:
        node.replace_all_uses_with(found)
        self.replaced[node] = found

    def _call(self, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """A call in front of the node that is visited, of a function or a method."""
        graph = self._module.graph
        with graph.inserting_before(self._before):
            add = graph.call_method if isinstance(target, str) else graph.call_function
            made = add(target, args, kwargs)
        made.meta = {**self._before.meta, "example_value": value_of_call(target, args, kwargs)}
        return made


def _treats_each_by_itself(module: fx.GraphModule, node: fx.Node, of_rows: Set[fx.Node], num_rows: int) -> bool:
    """Whether what `node` returns consists of rows that depend on one row each of those of its inputs `of_rows`."""
    inputs = tuple(node.all_input_nodes)
    joint = trace_part(module, [node], inputs, [node])
    dims = {port: 0 for port in joint.inputs if inputs[int(port.name)] in of_rows}
    found = follow_samples([joint], dims, num_rows, joint.outputs).outputs.get(joint.outputs[0])
    return isinstance(found, Shard) and (found.dim, found.outer) == (0, 1)
