"""Write out the gradients that a forward takes of its own values, as models of forces and differential equations do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpar._torch.compiler import make_fx, set_inplace_requires_grad_allowed
from fxpar._torch.dynamo.replaced_functions import tracing_in_place_of
from fxpar.errors import UnsupportedGraphError
from fxpar.ir.markers import is_marker
from fxpar.ir.node_meta import where
from fxpar.ir.op_predicates import draws
from fxpar.ir.replace_items import replace_items

aten = torch.ops.aten

_OF_MEAN = "fxpar_gradient_of_mean"
"""The key, in the meta of what computes a gradient, of whether that is one of a mean: see `gradients_of_means`."""

_SUMS = (torch.sum, "sum", aten.sum.default, aten.sum.dim_IntList)


def gradients_in_one_graph() -> AbstractContextManager[None]:
    """Within, Dynamo traces `torch.autograd.grad` as a call of `gradients`, which `write_out_gradients` replaces."""
    return tracing_in_place_of(torch.autograd.grad, _grad)


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor, ...]:
    """What Dynamo traces: the arguments of `torch.autograd.grad` as those of `gradients`."""
    seeds = None if grad_outputs is None else _listed(grad_outputs)
    may_be_unused = allow_unused is True or materialize_grads
    return gradients(_listed(outputs), _listed(inputs), seeds, create_graph, may_be_unused, is_grads_batched)


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, Tensor) else list(given)


def gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor | None] | None,
    create_graph: bool,
    may_be_unused: bool,
    is_batched: bool,
) -> tuple[Tensor, ...]:
    """Stands for `torch.autograd.grad` in Dynamo's graphs, where autograd need not connect the fake values.

    Args:
        seeds: what the gradients of `outputs` are; None: ones.
        may_be_unused: whether the gradient by an input that has none is zero, and not an error.
        is_batched: whether the seeds have one more dim in front, and so have the gradients.
    """
    return tuple(torch.empty_like(value, requires_grad=create_graph) for value in inputs)


torch.compiler.allow_in_graph(gradients)


@contextmanager
def without_leaves(module: fx.GraphModule) -> Iterator[None]:
    """Drop every `value.requires_grad_()`. Within, such values still say that they require grad, and after it no more.

    Once gradients are written out, what requires grad is told by the parameters that it depends on.
    """
    leaves = list[Tensor]()
    for node in module.graph.find_nodes(op="call_method", target="requires_grad_"):
        (leaf,) = node.all_input_nodes
        leaves.append(leaf.meta["example_value"])
        for switch in (node.prev, node.next):
            assert switch.target is set_inplace_requires_grad_allowed, f"{switch} is written around {node}"
            module.graph.erase_node(switch)
        node.replace_all_uses_with(leaf)
        module.graph.erase_node(node)
    yield
    for leaf in leaves:
        leaf.requires_grad_(False)


def write_out_gradients(module: fx.GraphModule) -> None:
    """Replace every call of `gradients` in `module`, a graph from Dynamo, by the ops that compute them.

    These are ops like others: they are differentiated in their turn, divided into stages, and sharded.

    Before: `tanh = torch.tanh(x)`, `gradients = gradients([tanh], [x], [ones], True, ...)`, `item = gradients[0]`
    After:  `tanh = torch.tanh(x)`, `item = aten.tanh_backward(ones, tanh)`

    Raises:
        UnsupportedGraphError: random numbers are drawn between a value and what it is differentiated by, one does not
            depend on the other, many gradients are asked for at once (`is_grads_batched`), or an argument of the
            forward is to require grad of which it does not take the gradient.
    """
    taken: set[fx.Node] = set()
    for node in module.graph.find_nodes(op="call_function", target=gradients):
        taken.update(_arguments(node)[1])
        _write_out(node)
    for node in module.graph.nodes:
        if is_marker(node, "enter") and _requires_grad(node) and not any(map(_requires_grad, node.all_input_nodes)):
            _forget_argument(node, is_taken=node in taken)
    module.recompile()


def _forget_argument(node: fx.Node, *, is_taken: bool) -> None:
    """Let an argument of the forward, which has made it require grad, do so no more."""
    if not is_taken:
        raise UnsupportedGraphError(
            f"the forward lets argument {node.args[3]} require grad, but takes no gradient by it: take it inside the "
            "forward, by torch.autograd.grad, or let the argument require grad before the call"
        )
    node.meta["example_value"].requires_grad_(False)


def gradients_of_means(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that compute gradients of scalars other than sums: that of a mean depends on the number of samples."""
    return [node for node in module.graph.nodes if node.meta.get(_OF_MEAN, False)]


def _write_out(call: fx.Node) -> None:
    """Compute what `call` returns by ATen's ops, and erase it."""
    outputs, inputs, seeds, create_graph, _, is_batched = _arguments(call)
    if is_batched:
        raise UnsupportedGraphError(
            f"{where(call)} takes many gradients at once, by is_grads_batched: expected one; take them one by one"
        )
    twins = _twins(call.graph)
    path = _between(inputs, outputs, twins)
    traced, known = _trace(call, path, twins)
    (results,) = traced.graph.output_node().args
    assert isinstance(results, tuple | list)
    values = dict(zip(results[len(inputs) :], path, strict=True))
    known |= {made: node for made, node in values.items() if isinstance(made, fx.Node) and made not in known}
    of_mean = seeds is None and any(_is_of_mean(output, path) for output in outputs)
    with call.graph.inserting_before(call):
        copies = _copy(traced.graph, results[: len(inputs)], known, call, of_mean=of_mean)
        found = list[fx.Node]()
        for made, value in zip(results, inputs, strict=False):
            if made is None:
                found.append(_constant(call.graph.call_function(torch.zeros_like, (value,)), call))
            elif create_graph:
                found.append(copies[made])
            else:
                found.append(_constant(call.graph.call_method("detach", (copies[made],)), call))
    replace_items(call, found)


def _arguments(call: fx.Node) -> tuple[Any, ...]:
    """Those of `gradients`, of which nodes are lists."""
    return call.args


def _twins(graph: fx.Graph) -> Callable[[fx.Node], fx.Node]:
    """For a node that reads a parameter the first that reads the same, for any other itself."""
    first: dict[Any, fx.Node] = {}
    markers = [node for node in graph.nodes if is_marker(node, "param")]
    firsts = {node: first.setdefault(node.args[4], node) for node in markers}
    return lambda node: firsts.get(node, node)


def _between(
    inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], twins: Callable[[fx.Node], fx.Node]
) -> list[fx.Node]:
    """The nodes that compute `outputs` from `inputs`, in order; those of values without gradients are none of them."""
    leaves, reached, path = set(map(twins, inputs)), set[fx.Node](), list[fx.Node]()
    for node in outputs[0].graph.nodes:
        if _requires_grad(node) and not reached.isdisjoint(map(twins, node.all_input_nodes)):
            reached.add(node)
            path.append(node)
        elif node in leaves:
            reached.add(node)
    needed = set(outputs)
    for node in reversed(path):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in path if node in needed]


def _requires_grad(node: fx.Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def _trace(
    call: fx.Node, path: Sequence[fx.Node], twins: Callable[[fx.Node], fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """The graph that returns the gradients and the values of `path`, and which nodes its placeholders stand for."""
    outputs, inputs, seeds, _, may_be_unused, _ = _arguments(call)
    own = set(path)
    entering = list(dict.fromkeys(twins(node) for node in _operands(call, path) if node not in own))

    def compute(*values: Tensor) -> list[Any]:
        held: dict[fx.Node, Any] = dict(zip(entering, values, strict=True))
        with torch.enable_grad():
            for node in path:
                held[node] = _run(node, *fx.map_arg((node.args, node.kwargs), lambda operand: held[twins(operand)]))
            given = fx.map_arg((outputs, inputs, seeds), lambda operand: held[twins(operand)])
            found = torch.autograd.grad(*given, create_graph=True, allow_unused=may_be_unused)
        return [*found, *(held[node] if isinstance(held[node], Tensor) else None for node in path)]

    examples = [node.meta["example_value"].detach() for node in entering]
    for node, value in zip(entering, examples, strict=True):
        value.requires_grad_(_requires_grad(node))
    try:
        with examples[0].fake_mode:  # autograd makes zeros
            traced: fx.GraphModule = make_fx(compute)(*examples)
    except RuntimeError as error:
        raise UnsupportedGraphError(f"{where(call)} takes a gradient that there is not: {error}") from error
    for node in traced.graph.find_nodes(op="call_function", target=aten.detach.default):
        # Autograd has kept this value for its gradient: it is differentiated like any other.
        (value,) = node.all_input_nodes
        node.replace_all_uses_with(value)
        traced.graph.erase_node(node)
    placeholders = traced.graph.find_nodes(op="placeholder")
    return traced, dict(zip(placeholders, entering, strict=True))


def _operands(call: fx.Node, path: Iterable[fx.Node]) -> Iterator[fx.Node]:
    yield from call.all_input_nodes
    for node in path:
        yield from node.all_input_nodes


def _run(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if node.op == "call_method":
        made = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        assert node.op == "call_function" and callable(node.target), f"{node.format_node()} computes a value"
        made = node.target(*args, **kwargs)
    traced = node.meta["example_value"]
    if isinstance(made, Tensor) and made.dtype != traced.dtype:
        raise UnsupportedGraphError(
            f"{where(node)} is differentiated inside the forward, where it computes in {traced.dtype} by autocast: "
            "expected no autocast there; convert the model, or see Precision"
        )
    return made


def _copy(
    graph: fx.Graph, results: Sequence[Any], known: Mapping[fx.Node, fx.Node], call: fx.Node, *, of_mean: bool
) -> dict[Any, fx.Node]:
    """Copy what computes `results` from `known`, whose copies are there, before `call`; returns the copies."""
    needed = {result for result in results if isinstance(result, fx.Node)}
    for node in reversed(graph.nodes):
        if node in needed and node not in known:
            needed.update(node.all_input_nodes)
    copies: dict[Any, fx.Node] = dict(known)
    for node in graph.nodes:
        if node not in needed or node in copies:
            continue
        if draws(node):
            raise UnsupportedGraphError(
                f"{where(call)} differentiates a value that random numbers were drawn for: expected none between it "
                "and what it is differentiated by; evaluate that part, without dropout"
            )
        copies[node] = _like(call.graph.node_copy(node, copies.__getitem__), call, node.meta["val"])
        copies[node].meta[_OF_MEAN] = of_mean
    return copies


def _constant(made: fx.Node, call: fx.Node) -> fx.Node:
    """Let a node count as constant: `made` computes zeros like its operand, or is that without its gradient."""
    (operand,) = made.all_input_nodes
    _like(made, call, operand.meta["example_value"])
    made.meta["example_value"].requires_grad_(False)
    return made


def _like(made: fx.Node, call: fx.Node, value: Any) -> fx.Node:
    """Give a node the origin of `call`, and the value that Dynamo would have computed for it."""
    depends = any(map(_requires_grad, made.all_input_nodes))

    def computed(leaf: Tensor) -> Tensor:
        return leaf.detach().requires_grad_(depends and leaf.is_floating_point())

    made.meta = {**call.meta, "example_value": pytree.tree_map_only(Tensor, computed, value)}
    return made


def _is_of_mean(output: fx.Node, path: Sequence[fx.Node]) -> bool:
    """Whether a value is one number, and no sum of the tensor that it was computed from."""
    own, waiting = set(path), [output]
    while waiting:
        node = waiting.pop()
        value = node.meta["example_value"]
        if node not in own or not isinstance(value, Tensor) or value.dim() > 0:
            continue
        of_tensors = any(_is_tensor_with_dims(operand) for operand in node.all_input_nodes if operand in own)
        if of_tensors and node.target not in _SUMS:
            return True
        waiting += node.all_input_nodes
    return False


def _is_tensor_with_dims(node: fx.Node) -> bool:
    value = node.meta["example_value"]
    return isinstance(value, Tensor) and value.dim() > 0
