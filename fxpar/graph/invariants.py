"""Invariants of graphs between passes, checked if FXPAR_CHECK=1: errors name the pass that broke one, and the node.

In every graph, nodes have values, which are what their ops return, no result is unused, and no wait is missing. Layouts
fit the values. Passes that divide graphs or order collectives lose no collective and add none.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpar._torch.compiler import FakeTensor
from fxpar._torch.distributed import c10d_functional
from fxpar.graph.graph_writer import fake_mode_of
from fxpar.ir.layout import Layout
from fxpar.ir.node_meta import communication, fused, has_no_result, known_placed, tensor_operands, value
from fxpar.ir.op_predicates import has_effect, is_collective

_WAIT = c10d_functional.wait_tensor.default


class Form(Enum):
    """What kind of graph a pass leaves."""

    LOGICAL = "logical"
    """ATen ops on logical values, without layouts."""
    LAID_OUT = "laid out"
    """ATen ops on logical values, every one with the layouts of its operands and results."""
    LOCAL = "local"
    """ATen ops and collectives on the pieces of one rank; layouts only where they are still needed."""
    STARTING = "starting"
    """As local, but returns the outputs of collectives that are still in flight."""


class BrokenInvariantError(AssertionError):
    """A pass left a graph that breaks an invariant: a bug of fxpar's, not of its user."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}; please report this, with the files that FXPAR_DUMP=<folder> writes")


def check_graph(module: fx.GraphModule, form: Form, where: str, coordinate: Mapping[str, int] | None = None) -> None:
    """Check `module` by itself.

    Args:
        where: the pass and the stage, for the message.
        coordinate: of the rank whose pieces a local graph computes; None if it is not known.

    Raises:
        BrokenInvariantError: names the first node that breaks an invariant.
    """
    try:
        module.graph.lint()
    except RuntimeError as error:
        raise BrokenInvariantError(where, str(error)) from error
    for node in module.graph.nodes:
        if node.op in ("output", "get_attr"):
            continue
        for problem in (_value_problem(node), _use_problem(node), _collective_problem(node, form)):
            if problem is not None:
                raise BrokenInvariantError(where, f"{node} ({node.target}) {problem}")
        if form is not Form.LOGICAL and (problem := _layout_problem(node, form, coordinate)) is not None:
            raise BrokenInvariantError(where, f"{node} ({node.target}) {problem}")
    _check_results(module, where)


def check_collectives_kept(
    before: Iterable[fx.GraphModule], after: Iterable[fx.GraphModule], where: str, *, may_repeat: bool = False
) -> None:
    """Check that the graphs `after` a pass communicate what those `before` it did; fused ops count as their collective.

    Args:
        may_repeat: whether a collective may be in several graphs, such as a gather that a backward repeats.

    Raises:
        BrokenInvariantError: a collective is lost, or was added.
    """
    had, have = _communicated(before), _communicated(after)
    if lost := had - have:
        raise BrokenInvariantError(where, f"lost collectives: {_listed(lost)}")
    added = have - had
    if added and not (may_repeat and added.keys() <= had.keys()):
        raise BrokenInvariantError(where, f"added collectives: {_listed(added)}")


def _communicated(modules: Iterable[fx.GraphModule]) -> Counter[str]:
    nodes = [node for module in modules for node in module.graph.nodes]
    return Counter(str(done) for node in nodes if (done := communication(node) or fused(node)) is not None)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _value_problem(node: fx.Node) -> str | None:
    if "val" not in node.meta:
        return None if has_no_result(node) else "has no value"
    found = value(node)
    if real := [type(leaf).__name__ for leaf in pytree.tree_leaves(found) if _is_real(leaf)]:
        return f"has a {real[0]} for a value, not a FakeTensor"
    if node.op != "call_function":
        return None
    made, noted = _made_by(node), _described(found)
    return None if made is None or made == noted else f"has the value {noted}, but returns {made}"


def _is_real(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)


def _use_problem(node: fx.Node) -> str | None:
    if node.op != "call_function" or node.users or has_effect(node):
        return None
    return "has no users"


def _collective_problem(node: fx.Node, form: Form) -> str | None:
    done = communication(node)
    if done is None:
        starts = is_collective(node) and node.target is not _WAIT
        return "is a collective without a recorded `Communication`" if starts else None
    may_leave = form is Form.STARTING
    early = [user for user in node.users if user.target is not _WAIT and not (may_leave and user.op == "output")]
    return f"is used by {early[0]} before it is waited for" if early else None


def _layout_problem(node: fx.Node, form: Form, coordinate: Mapping[str, int] | None) -> str | None:
    placed = known_placed(node)
    if placed is None:
        return "has no layouts" if form is Form.LAID_OUT and _is_laid_out(node) else None
    results = [leaf for leaf in pytree.tree_leaves(value(node)) if isinstance(leaf, Tensor)]
    for layout, result in zip(placed.outputs, results, strict=False):
        if layout is not None and not _fits(layout, tuple(result.shape), form, coordinate):
            return f"has shape {list(result.shape)}, but the layout {layout}"
    if form is Form.LAID_OUT and placed.inputs and node.target is not operator.getitem:
        shapes = [tuple(value(operand).shape) for operand in tensor_operands(node)]
        if [layout.shape for layout in placed.inputs] != shapes:
            return f"has operands of shapes {shapes}, but the layouts {[str(layout) for layout in placed.inputs]}"
    return None


def _is_laid_out(node: fx.Node) -> bool:
    return node.target is not operator.getitem and isinstance(node.meta.get("val"), Tensor)


def _fits(layout: Layout, shape: tuple[int, ...], form: Form, coordinate: Mapping[str, int] | None) -> bool:
    if form is Form.LAID_OUT:
        return layout.shape == shape
    return coordinate is None or layout.local_shape(coordinate) == shape


def _check_results(module: fx.GraphModule, where: str) -> None:
    leaving = pytree.tree_leaves(module.graph.output_node().args)
    odd = [leaf for leaf in leaving if isinstance(leaf, Tensor)]
    if odd:
        raise BrokenInvariantError(where, f"the graph returns {odd[0]}, which no node computed")


_made: dict[Hashable, Hashable] = {}
"""A cache of what ops return, by op and operands: layers repeat each other, so most calls are in it."""


def _made_by(node: fx.Node) -> Hashable | None:
    """The shapes, dtypes and strides that the op at `node` returns for its operands; None where that is not known."""
    if node.target is operator.getitem:
        return _described(operator.getitem(*fx.map_arg(node.args, value)))
    if not isinstance(node.target, torch._ops.OpOverload) or has_no_result(node):
        return None
    call = node.target, _described_operand(node.args), _described_operand(node.kwargs)
    if call not in _made:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        with fake_mode_of(node.graph):
            _made[call] = _described(node.target(*args, **kwargs))
    return _made[call]


def _described_operand(operand: object) -> Hashable:
    """All that the result of an op can depend on, of nodes their values; in one walk, since it is done so often."""
    if isinstance(operand, fx.Node):
        return _described(value(operand))
    if isinstance(operand, list | tuple):
        return tuple(map(_described_operand, operand))
    if isinstance(operand, dict):
        return tuple((name, _described_operand(each)) for name, each in operand.items())
    return _described_leaf(operand)


def _described(found: Any) -> Hashable:
    leaves = [found] if isinstance(found, Tensor) else pytree.tree_leaves(found)
    return tuple(map(_described_leaf, leaves))


def _described_leaf(leaf: object) -> Hashable:
    if isinstance(leaf, Tensor):
        return str(leaf.dtype), tuple(leaf.shape), _strides(leaf), leaf.device.type
    return type(leaf).__name__, str(leaf)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of dims that have several elements; others have no meaning."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
