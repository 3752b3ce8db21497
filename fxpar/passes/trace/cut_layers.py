"""Find where to cut a stage's forward such that equal layers become equal pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from fxpar._torch.compiler import FakeTensor
from fxpar.graph.changes_in_place import changed_memory
from fxpar.graph.describe import describe, describe_call
from fxpar.graph.repeats import count_crossings, find_repeats
from fxpar.graph.shared_values import is_context
from fxpar.ir.node_meta import known_value

COST_OF_A_TRACE = 8
"""Calling AOTAutograd takes as long as tracing so many ops: repeats of fewer stay together."""


def operations(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that compute, in order."""
    return [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]


def cut_layers(module: fx.GraphModule, *, with_backward: bool) -> list[int]:
    """The positions among the operations of a torch-IR graph before which a layer begins or the last one has ended.

    If the same ops with the same constants, shapes and strides occur several times in a row, cuts are where fewest
    values cross them. None is within a context (autocast, grad mode) or a transform of `torch.func`, between an op and
    the items of its result, between a value and a change of it in place, or among the values that the graph returns.
    Without a backward, the grad mode has no meaning.

    Before: embedding, [layer_norm, linear, ..., add], [layer_norm, linear, ..., add], layer_norm, linear
    After:  the positions of the two layers and of the last layer_norm
    """
    nodes = operations(module)
    if any(node.op == "get_attr" for node in nodes):  # a submodule, such as a branch, is equal to no other
        return []
    forbidden = _forbidden(module, nodes, with_backward)
    crossings = count_crossings([(node,) for node in nodes])
    prices = [len(nodes) * (position in forbidden) + crossed for position, crossed in enumerate(crossings)]
    labels = [_label(node) for node in nodes]
    cuts: set[int] = set()
    for repeat in find_repeats(labels, prices, COST_OF_A_TRACE):
        cuts.update(range(repeat.start, repeat.stop + 1, repeat.period))
    return sorted(cuts - forbidden - {0, len(nodes)})


def describe_value(node: fx.Node) -> str:
    """The type of a torch-IR value, and whether it requires a gradient."""
    found = known_value(node)
    return f"{describe(found)} {found.requires_grad}" if isinstance(found, Tensor) else describe(found)


def _label(node: fx.Node) -> str:
    """An op with its constants, and the types of its arguments and results, whatever nodes these are."""
    names = {source: describe_value(source) for source in node.all_input_nodes}
    return f"{describe_value(node)} = {describe_call(node, names)}"


def _forbidden(module: fx.GraphModule, nodes: Sequence[fx.Node], with_backward: bool) -> set[int]:
    """The positions at which a cut would change what is computed, or leave something else than tensors to cross."""
    place = {node: position for position, node in enumerate(nodes)}
    given = set(module.graph.find_nodes(op="placeholder"))
    (output,) = module.graph.find_nodes(op="output")
    returned = [place[node] for node in output.all_input_nodes if node in place]
    stretches = [
        *_items(nodes, place),
        *(memory.stretch(place) for memory in changed_memory(module.graph.nodes, given)),
        *_contexts(nodes, place, with_backward),
    ]
    stretches.append((min(returned, default=len(nodes)), len(nodes)))
    return {position for first, last in stretches for position in range(first + 1, last + 1)}


def _items(nodes: Sequence[fx.Node], place: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """From each op whose result is no tensor, or one that a transform of `torch.func` wraps, to the last use of it."""
    for node in nodes:
        if not isinstance(known_value(node), FakeTensor):
            yield place[node], max((place.get(user, len(nodes)) for user in node.users), default=place[node])


def _contexts(nodes: Sequence[fx.Node], place: dict[fx.Node, int], with_backward: bool) -> Iterator[tuple[int, int]]:
    """From the op that enters a context to the one that leaves it; all that follow one of which that is not known."""
    without_grad: int | None = None
    for node in nodes:
        if node.target is torch._C._set_grad_enabled:
            if without_grad is not None and node.args[0]:
                yield without_grad, place[node]
            if without_grad is None or node.args[0]:
                without_grad = place[node] if with_backward and not node.args[0] else None
        elif is_context(node) and not node.all_input_nodes and node.target is not torch._C._log_api_usage_once:
            yield place[node], max((place.get(user, len(nodes)) for user in node.users), default=len(nodes))
    if without_grad is not None:
        yield without_grad, len(nodes)
