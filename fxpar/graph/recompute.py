"""Choose the values of the forward that the backward recomputes instead of having them saved."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import fx

import fxpar.ir.random  # noqa: F401  registers fxpar::streams and fxpar::uniform
from fxpar.graph.extract import returned
from fxpar.graph.gathered_weights import is_gathered, made_of_parameters
from fxpar.graph.min_cut import can_be_kept, closure, users
from fxpar.ir.node_meta import is_backward, layer_path, module_path, region, tensor
from fxpar.ir.op_predicates import has_effect, is_free_to_recompute, is_pointwise
from fxpar.ir.remat import Remat
from fxpar.ir.stage import JointGraph, PortKind

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Nodes of the forward that the backward may run again; of these, `dropped` are never saved for it."""

    again: AbstractSet[fx.Node]
    dropped: AbstractSet[fx.Node]


def choose_recomputed(joint: JointGraph, remat: Remat) -> Recomputed:
    """The nodes of the local graph `joint` that the backward may, and must, recompute.

    Values that leave a checkpointed region are saved, the others are dropped. Gathered weights are saved up to
    `gathered_bytes`, those of the last layers first, whose backward runs first; the others are dropped.
    Source: caching of gathered weights under activation checkpointing (Singh et al., section on overlap).
    """
    forward = forward_of(joint)
    weights = made_of_parameters(joint)
    kept = _within([node for node in weights if is_gathered(node)], remat.gathered_bytes)
    dropped = {node for node in weights if is_gathered(node) and node not in kept}
    again = {node for node in weights if node not in kept} if dropped or kept else set[fx.Node]()
    dropped |= _inside_regions(forward, joint, remat).difference(weights)
    if remat.policy == "min_cut":
        again |= {node for node in forward if _is_cheap(node)}
    fixed = _cannot_repeat(joint)
    return Recomputed((again | dropped) - fixed, dropped - fixed)


def forward_of(joint: JointGraph) -> list[fx.Node]:
    """The calls that autograd has not tagged as backward, and that depend on no tangent."""
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    late = closure(placeholders[len(joint.inputs) :], users)
    return [
        node
        for node in joint.module.graph.nodes
        if node.op == "call_function" and not is_backward(node) and node not in late
    ]


def _cannot_repeat(joint: JointGraph) -> set[fx.Node]:
    """Nodes with side effects, and nodes that depend on buffers that have changed when the backward runs."""
    placeholders = dict(zip(joint.inputs, joint.module.graph.find_nodes(op="placeholder"), strict=False))
    changed = [placeholders[port] for port in joint.outputs if port.kind is PortKind.BUFFER]
    return closure(changed, users) | {node for node in joint.module.graph.nodes if has_effect(node)}


def _within(gathered: Sequence[fx.Node], num_bytes: float) -> set[fx.Node]:
    """Those of the `gathered` weights, the last ones first, that take no more than `num_bytes` together."""
    kept, left = set[fx.Node](), num_bytes
    for node in reversed(gathered):
        if tensor(node).nbytes <= left:
            left -= tensor(node).nbytes
            kept.add(node)
    return kept


def _inside_regions(forward: Sequence[fx.Node], joint: JointGraph, remat: Remat) -> set[fx.Node]:
    """The nodes of checkpointed regions whose values no other part of the forward uses.

    Items of a tuple are left out if another item leaves the region: the op runs once, and a tuple cannot be saved.
    """
    results = {*returned(joint.module)[: len(joint.outputs)]}
    leaves: dict[fx.Node, bool] = {}
    for node in reversed(forward):
        own = _region(node, remat)
        readers = [user for user in node.users if user in leaves]
        leaves[node] = node in results or any(
            leaves[user] if is_free_to_recompute(user) else _region(user, remat) != own for user in readers
        )
    inside = set[fx.Node]()
    for node in forward:
        stays = _region(node, remat) is not None and not leaves[node]
        if stays and all(operand in inside or can_be_kept(operand) for operand in node.all_input_nodes):
            inside.add(node)
    return inside


def _region(node: fx.Node, remat: Remat) -> str | None:
    return region(node) or (layer_path(module_path(node)) if remat.policy == "full" else None)


def _is_cheap(node: fx.Node) -> bool:
    """Whether the op is memory-bound, and takes no longer than reading its result."""
    if not isinstance(node.target, torch._ops.OpOverload) or has_effect(node):
        return False
    return is_pointwise(node.target) or node.target in _CHEAP or is_free_to_recompute(node)


_CHEAP = {
    aten._to_copy.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    torch.ops.fxpar.streams.default,
    torch.ops.fxpar.uniform.default,
}
"""In addition to pointwise ops. Random numbers are drawn by logical index, so they are the same when recomputed."""
