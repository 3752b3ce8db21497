"""Decompose the ops that shard better in parts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fxpar._torch.compiler import make_fx
from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.graph.describe import describe, describe_arguments
from fxpar.graph.graph_writer import fake_mode_of
from fxpar.ir.node_meta import is_backward, set_origin, tag_direction, tensor, value
from fxpar.ir.strides import strided_like
from fxpar.passes.decompose.decompositions import DECOMPOSITIONS, cross_entropy_backward
from fxpar.passes.decompose.norm_decompositions import NORMS
from fxpar.passes.decompose.norm_policy import ONE_RANK, NormPolicy
from fxpar.progress.phases import as_phase

aten = torch.ops.aten

Decomposed: TypeAlias = MutableMapping[str, fx.Graph]
"""The graph of each decomposition by all that it depends on, as text."""


@as_phase
def decompose_for_sharding(
    joint: fx.GraphModule, norm_policy: NormPolicy = ONE_RANK, known: Decomposed | None = None
) -> fx.GraphModule:
    """The same graph with the ops of `DECOMPOSITIONS` decomposed, and every node tagged forward or backward.

    Norms are decomposed where `norm_policy` expects them to shard better. Placeholders and outputs keep their order,
    and nodes the record of their origin. Equal calls on equal values are decomposed once.

    Args:
        known: decompositions of calls in other stages of the same capture; those of this stage are added.

    Before: `addmm = aten.addmm(b, x, w)`
    After:  `mm = aten.mm(x, w)`, `add = aten.add(mm, b)`
    """
    mode, traced = fake_mode_of(joint.graph), {} if known is None else known
    graph = ConcreteGraph()
    copies: dict[fx.Node, Any] = {}
    for node in joint.graph.nodes:
        if node.target is aten._assert_tensor_metadata.default:
            continue  # it asserts logical shapes, which the trace has checked
        decomposed = _decomposed(node, norm_policy)
        if decomposed is not None:
            with mode:
                part = _traced(node, *decomposed, traced)
            copies[node] = _inline(graph, node, part, copies, *decomposed[1:])
        elif node.target is operator.getitem and isinstance(copies[node.args[0]], tuple | list):
            copies[node] = copies[node.args[0]][node.args[1]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    _tag(graph)
    graph.eliminate_dead_code()
    return lazy_graph_module(joint, graph)


def _decomposed(
    node: fx.Node, norm_policy: NormPolicy
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]] | None:
    """The decomposition of the op at `node`, with its arguments; None if the op stays whole."""
    if node.op != "call_function":
        return None
    if node.target is aten._log_softmax_backward_data.default:
        grad, output, dim, input_dtype = node.args
        assert isinstance(grad, fx.Node)
        if _picks_targets(grad, output, dim):
            return cross_entropy_backward, grad.args, {"input_dtype": input_dtype}
    assert callable(node.target)
    table = NORMS if norm_policy.decomposes(node) else DECOMPOSITIONS
    decomposition = table.get(node.target)
    return None if decomposition is None else (decomposition, node.args, dict(node.kwargs))


def _picks_targets(grad: fx.Node, output: Any, dim: Any) -> bool:
    """Whether `grad` is the gradient of an NLL loss without class weights on `output`, whose classes are `dim`."""
    if grad.target not in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default):
        return False
    _, log_probs, _, weight, *_ = grad.args
    class_dim = min(1, tensor(output).dim() - 1)
    return weight is None and _origin(log_probs) is _origin(output) and dim % tensor(output).dim() == class_dim


def _origin(node: Any) -> Any:
    """The node that `node` is a detach or an alias of, or `node` itself."""
    return _origin(node.args[0]) if node.target in (aten.detach.default, aten.alias.default) else node


def _traced(
    node: fx.Node, decomposition: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], known: Decomposed
) -> fx.Graph:
    """The ops of `decomposition` on `args` and `kwargs`, with a placeholder for each use of a node."""
    operands = _operands(args, kwargs)
    names = {used: f"%{position} {describe(value(used))}" for position, used in enumerate(operands)}
    call = describe_arguments((tuple(args), dict(kwargs)), names)
    kind = f"{node.target} by {decomposition.__qualname__}{call} = {describe(value(node))}"

    def run(*values: Tensor) -> Any:
        given = iter(values)
        own_args, own_kwargs = fx.map_arg((args, kwargs), lambda _: next(given))
        return tree_map(_like, decomposition(*own_args, **own_kwargs), value(node))

    if kind not in known:
        with torch.no_grad():
            known[kind] = make_fx(run)(*map(value, operands)).graph
    return known[kind]


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[fx.Node]:
    """The nodes among the arguments, with repeats."""
    operands: list[fx.Node] = []
    fx.map_arg((args, kwargs), operands.append)
    return operands


def _inline(
    graph: fx.Graph,
    node: fx.Node,
    part: fx.Graph,
    copies: Mapping[fx.Node, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Append the ops of `part` on copies of the arguments; returns its results, nested as those of `node`."""
    given = map(copies.__getitem__, _operands(args, kwargs))
    inlined = dict(zip(part.find_nodes(op="placeholder"), given, strict=True))
    for traced in part.nodes:
        if traced.op == "call_function":
            copy = graph.node_copy(traced, inlined.__getitem__)
            set_origin(copy, node, backward=is_backward(node))
            inlined[traced] = copy
    (output,) = part.find_nodes(op="output")
    return fx.map_arg(output.args[0], inlined.__getitem__)


def _like(found: Tensor | None, expected: Tensor | None) -> Tensor | None:
    """`found` with the dtype and strides of the op's result: statistics may have another precision than operands."""
    return None if found is None or expected is None else strided_like(found.to(expected.dtype), expected)


def _tag(graph: fx.Graph) -> None:
    """Tag as backward what autograd tagged so and all that depends on it, and the rest as forward."""
    for node in graph.nodes:
        if node.op != "output":
            tag_direction(node, backward=is_backward(node) or any(map(is_backward, node.all_input_nodes)))
