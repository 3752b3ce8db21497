"""Find the values of a forward that every stage may compute for itself, in spite of in-place operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import fx

from fxpar.graph.changes_in_place import changed_operands, changed_sources, storages_mutated_later, tensors_of
from fxpar.ir.op_predicates import is_random
from fxpar.ir.stage import Port, PortKind


def is_context(node: fx.Node) -> bool:
    """Whether `node` enters or leaves a context (autocast, grad mode): it neither takes nor returns a tensor.

    Every stage keeps all of them, so that each operation runs in the context it was written in.
    """
    return (
        node.op == "call_function" and not tensors_of(node) and not any(tensors_of(arg) for arg in node.all_input_nodes)
    )


def is_side_effect_only(node: fx.Node) -> bool:
    """Whether `node` takes tensors, and neither returns nor changes any: it has another effect, as an assertion has.

    It runs once, on the stage that it was written in.
    """
    if node.op not in ("call_function", "call_method") or is_context(node):
        return False
    return not tensors_of(node) and not changed_operands(node)


def recomputable(order: Sequence[fx.Node], sources: Mapping[fx.Node, Port]) -> Set[fx.Node]:
    """The nodes that depend on inputs and constants alone and draw no random numbers: cheap, so never sent.

    What depends on a buffer that is changed in place is left out: only one stage has its new value. A value that an
    in-place operation changes is recomputable only if that operation is.
    """
    parameters = {node for node, port in sources.items() if port.kind is PortKind.PARAMETER}
    return independent_of(parameters | changed_sources(order, sources), order)


def independent_of(excluded: Set[fx.Node], order: Sequence[fx.Node]) -> Set[fx.Node]:
    """The nodes that depend neither on `excluded` nodes nor on random numbers, nor do the changes of their values."""
    excluded = set(excluded)
    while True:
        found = _free_of(order, excluded)
        spoiled = {owner for owner, mutator in storages_mutated_later(order) if owner in found and mutator not in found}
        if not spoiled:
            return found
        excluded |= spoiled


def _free_of(order: Sequence[fx.Node], excluded: Set[fx.Node]) -> set[fx.Node]:
    tainted = set(excluded)
    for node in order:
        if node not in tainted and (is_random_call(node) or any(used in tainted for used in node.all_input_nodes)):
            tainted.add(node)
    return {node for node in order if node not in tainted and not is_context(node) and not is_side_effect_only(node)}


def is_random_call(node: fx.Node) -> bool:
    """Whether a node of a graph from Dynamo draws random numbers, as far as its name tells."""
    if isinstance(node.target, torch._ops.OpOverload):
        return is_random(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return any(
        word in name for word in ("dropout", "rand", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_")
    )
