"""Calls on rows for all places of a mask, in the place of calls on the rows that it selects."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpar.errors import DataDependentShapeError
from fxpar.graph.describe import describe, describe_call
from fxpar.ir.capture import example
from fxpar.ir.layout import Shard
from fxpar.ir.node_meta import known_value, source_line
from fxpar.passes.decompose.follow_samples import follow_samples
from fxpar.passes.selected_rows.found import Found
from fxpar.passes.selected_rows.rows import Rows, RowWriter
from fxpar.passes.trace_part import trace_part


@dataclass(frozen=True, slots=True)
class Made:
    """A call on rows of one mask, in the place of selected ones."""

    node: fx.Node
    rows: tuple[Rows, ...]


def refusal(node: fx.Node) -> DataDependentShapeError:
    """The error that what `node` does with selected rows needs these alone."""
    return DataDependentShapeError(node.name, source_line(node))


class RowCalls:
    """Makes such calls, by `writer`, in the graph of a module."""

    def __init__(self, module: fx.GraphModule, found: Found, writer: RowWriter) -> None:
        self._module, self._found, self._writer = module, found, writer
        self._dims_of_kinds: dict[str, int | None] = {}

    def dims_of(self, node: fx.Node) -> tuple[int, ...]:
        """The dims of the mask along which what `node` takes has rows."""
        used = [self._found.rows[each] for each in node.all_input_nodes if each in self._found.rows]
        if len({each.mask for each in used}) > 1:
            raise refusal(node)
        return tuple(sorted({dim for each in used for dim in each.dims}))

    def on_rows(self, node: fx.Node, args: Any, kwargs: Any, dims: tuple[int, ...]) -> Rows:
        """The call of `node` with these arguments, on rows for all places along `dims` in place of the selected ones.

        Raises:
            DataDependentShapeError: it does not treat each row by itself.
        """
        made = self.make(node, args, kwargs, dims)
        return self._with_rows(node, [made.node], made)

    def make(self, node: fx.Node, args: Any, kwargs: Any, dims: tuple[int, ...]) -> Made:
        """The call itself, of which `taken` gives the rows of an element, if it returns several tensors."""
        rows = {
            used: self._writer.expanded(self._found.rows[used], dims)
            for used in node.all_input_nodes
            if used in self._found.rows
        }
        args, kwargs = fx.map_arg((args, dict(kwargs)), lambda used: rows[used].node if used in rows else used)
        try:
            made = self._writer.call(node.target, *args, **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise refusal(node) from error
        return Made(made, tuple(rows.values()))

    def taken(self, node: fx.Node, made: Made) -> Rows:
        """The rows of one of several tensors."""
        taken = self._writer.call(operator.getitem, made.node, node.args[1])
        return self._with_rows(node, [made.node, taken], made)

    def _with_rows(self, node: fx.Node, calls: Sequence[fx.Node], made: Made) -> Rows:
        """What the last of `calls` returns, in the place of `node`: a row for each of those that the first takes."""
        mask, dims = made.rows[0].mask, made.rows[0].dims
        num_rows = example(self._writer.keep(mask, dims)).shape[0]
        of_rows = {each.node: each.dim for each in made.rows}
        names = {used: f"{describe(known_value(used))} {of_rows.get(used)}" for used in calls[0].all_input_nodes}
        names[calls[0]] = "made"
        kind = " ".join([str(num_rows), *(f"{call.op} {describe_call(call, names)}" for call in calls)])
        if kind not in self._dims_of_kinds:
            self._dims_of_kinds[kind] = _dim_of_rows(self._module, calls, of_rows, num_rows)
        dim = self._dims_of_kinds[kind]
        if dim is None:
            raise refusal(node)
        return Rows(calls[-1], mask, dims, dim)


def _dim_of_rows(
    module: fx.GraphModule, calls: Sequence[fx.Node], of_rows: Mapping[fx.Node, int], num_rows: int
) -> int | None:
    """The dim along which what the last of `calls` returns has rows that depend on one row each of the inputs' rows.

    None if it has none.

    Args:
        calls: one, or a call and one that takes an element of what it returns.
        of_rows: for inputs that have rows, the dim along which they lie.
    """
    inputs = tuple(calls[0].all_input_nodes)
    joint = trace_part(module, calls, inputs, [calls[-1]])
    dims = {port: of_rows[inputs[int(port.name)]] for port in joint.inputs if inputs[int(port.name)] in of_rows}
    found = follow_samples([joint], dims, num_rows, joint.outputs).outputs.get(joint.outputs[0])
    return found.dim if isinstance(found, Shard) and found.outer == 1 else None
