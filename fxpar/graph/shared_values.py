"""Find the values of a forward that every stage may compute for itself, in spite of in-place operations."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from fxpar._torch.compiler import schema, set_tensor_requires_grad, storage_of
from fxpar.ir.op_predicates import is_random
from fxpar.ir.stage import Port, PortKind

_STATISTICS = ("input", "running_mean", "running_var", "weight", "bias")
_NORMS: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: (*_STATISTICS, "training"),
    functional.instance_norm: (*_STATISTICS, "use_input_stats"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training"),
    torch.instance_norm: ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats"),
}
"""The arguments of normalizations that update buffers."""

_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")

_IN_PLACE_METHODS = {f"__{name}__" for name in _OPERATORS}

_IN_PLACE = {
    set_tensor_requires_grad,
    operator.setitem,
    *(getattr(operator, name) for name in _OPERATORS),
}


def is_context(node: fx.Node) -> bool:
    """Whether `node` enters or leaves a context (autocast, grad mode): it neither takes nor returns a tensor.

    Every stage keeps all of them, so that each operation runs in the context it was written in.
    """
    return node.op == "call_function" and not _tensors(node) and not any(_tensors(arg) for arg in node.all_input_nodes)


def is_side_effect_only(node: fx.Node) -> bool:
    """Whether `node` takes tensors, and neither returns nor changes any: it has another effect, as an assertion has.

    It runs once, on the stage that it was written in.
    """
    if node.op not in ("call_function", "call_method") or is_context(node):
        return False
    return not _tensors(node) and not changed_operands(node)


def changed_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that `node` changes in place."""
    if isinstance(out := node.kwargs.get("out"), fx.Node | tuple | list):
        return _nodes_in(out)
    if isinstance(node.target, torch._ops.OpOverload):
        return _written(node, node.target)
    if node.target in _NORMS:
        return _running_statistics(node)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    # Python has names for `and_` and `or_` since it has keywords of the other ones.
    is_operator = getattr(node.target, "__module__", None) == operator.and_.__module__
    in_place = name.endswith("_") and not name.endswith("__") and not is_operator
    if node.kwargs.get("inplace") or node.target in _IN_PLACE or name in _IN_PLACE_METHODS or in_place:
        return _nodes_in(node.args[0]) if node.args else tuple(node.all_input_nodes[:1])
    return ()


def _nodes_in(given: Any) -> tuple[fx.Node, ...]:
    return tuple(each for each in pytree.tree_leaves(given) if isinstance(each, fx.Node))


def _written(node: fx.Node, op: torch._ops.OpOverload) -> tuple[fx.Node, ...]:
    """The arguments that the op declares to change."""
    declared = schema(op).arguments
    given = {each.name: value for each, value in zip(declared, node.args, strict=False)} | node.kwargs
    return tuple(
        changed
        for each in declared
        if each.alias_info is not None and each.alias_info.is_write
        for changed in _nodes_in(given.get(each.name))
    )


def _running_statistics(node: fx.Node) -> tuple[fx.Node, ...]:
    """What a normalization in training updates."""
    given = dict(zip(_NORMS[node.target], node.args, strict=False)) | node.kwargs
    updates = given.get("training", given.get("use_input_stats", False))
    return _nodes_in([given.get("running_mean"), given.get("running_var")]) if updates else ()


def recomputable(order: Sequence[fx.Node], sources: Mapping[fx.Node, Port]) -> Set[fx.Node]:
    """The nodes that depend on inputs and constants alone and draw no random numbers: cheap, so never sent.

    What depends on a buffer that is changed in place is left out: only one stage has its new value. A value that an
    in-place operation changes is recomputable only if that operation is.
    """
    excluded = {node for node, port in sources.items() if port.kind is PortKind.PARAMETER}
    excluded |= changed_sources(order, sources)
    while True:
        found = _free_of(order, excluded)
        spoiled = {owner for owner, mutator in storages_mutated_later(order) if owner in found and mutator not in found}
        if not spoiled:
            return found
        excluded |= spoiled


def changed_sources(order: Sequence[fx.Node], sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Those of `sources` whose memory an operation changes in place, through whichever view of it."""
    changed = {storage for node in order for storage in _changed_storages(node)}
    return {node for node in sources if any(storage_of(t) in changed for t in _tensors(node))}


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


def storages_mutated_later(order: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs (node, later node that changes the storage of the first one's value in place)."""
    by_storage: dict[int, list[fx.Node]] = {}
    for node in order:
        for storage in _changed_storages(node):
            yield from ((earlier, node) for earlier in by_storage.get(storage, ()))
        for value in _tensors(node):
            by_storage.setdefault(storage_of(value), []).append(node)


def stretches_of_changes(
    nodes: Iterable[fx.Node], place: Mapping[fx.Node, int], harmless: Set[fx.Node] = frozenset()
) -> list[tuple[int, int]]:
    """For each storage that an op of `nodes` changes in place: from the first to the last op that has a view of it.

    Args:
        place: the positions of those of the nodes that count.
        harmless: changes that do not count.
    """
    touching: dict[int, list[int]] = {}
    changed: dict[int, None] = {}
    for node in nodes:
        places = [place[each] for each in (node, *node.users) if each in place]
        for value in _tensors(node):
            touching.setdefault(storage_of(value), []).extend(places)
        if node not in harmless:
            changed |= dict.fromkeys(_changed_storages(node))
    return [(min(places), max(places)) for storage in changed if (places := touching[storage])]


def _changed_storages(node: fx.Node) -> set[int]:
    return {storage_of(value) for each in changed_operands(node) for value in _tensors(each)}


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []
