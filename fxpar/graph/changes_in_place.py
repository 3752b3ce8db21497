"""Which operations of a graph from Dynamo change tensors in place, and whose memory that is."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from fxpar._torch.compiler import schema, set_tensor_requires_grad, storage_of

_STATISTICS = ("input", "running_mean", "running_var", "weight", "bias")
_NORMS: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: (*_STATISTICS, "training"),
    functional.instance_norm: (*_STATISTICS, "use_input_stats"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training"),
    torch.instance_norm: ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats"),
}
"""The arguments of normalizations that update buffers; the last one says whether to."""

_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")

_IN_PLACE_METHODS = {f"__{name}__" for name in _OPERATORS}

_IN_PLACE = {
    set_tensor_requires_grad,
    operator.setitem,
    *(getattr(operator, name) for name in _OPERATORS),
}


def changed_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that `node` changes in place."""
    if isinstance(out := node.kwargs.get("out"), fx.Node | tuple | list):
        return _nodes_in(out)
    if isinstance(node.target, torch._ops.OpOverload):
        return _written(node, node.target)
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        overloads = (getattr(node.target, each) for each in node.target.overloads())
        return tuple(dict.fromkeys(changed for each in overloads for changed in _written(node, each)))
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
    names = _NORMS[node.target]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    updates = given.get(names[-1], node.target is functional.instance_norm)  # its default
    return _nodes_in([given.get("running_mean"), given.get("running_var")]) if updates else ()


def changed_sources(order: Sequence[fx.Node], sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Those of `sources` whose memory an operation changes in place, through whichever view of it."""
    changed = {storage for node in order for storage in _changed_storages(node)}
    return {node for node in sources if any(storage_of(t) in changed for t in tensors_of(node))}


def storages_mutated_later(order: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs (node, later node that changes the storage of the first one's value in place)."""
    by_storage: dict[int, list[fx.Node]] = {}
    for node in order:
        for storage in _changed_storages(node):
            yield from ((earlier, node) for earlier in by_storage.get(storage, ()))
        for value in tensors_of(node):
            by_storage.setdefault(storage_of(value), []).append(node)


@dataclass(frozen=True, slots=True, eq=False)
class ChangedMemory:
    """Memory that operations change in place, through whichever view of it.

    views: the nodes whose values are in it, in order.
    changes: the operations that change it.
    is_given: whether a graph is given it: that of a parameter, a buffer, or an argument.
    """

    views: Sequence[fx.Node]
    changes: Sequence[fx.Node]
    is_given: bool

    def stretch(self, place: Mapping[fx.Node, int]) -> tuple[int, int]:
        """From the first op that has a view of it to the last one that matters for who reads it.

        What a graph is given is read where it is used, up to the last use; what it computes is a value like any other
        after the last change.

        Args:
            place: the positions of those of the nodes that count.
        """
        touching = [place[each] for node in self.views for each in (node, *node.users) if each in place]
        return min(touching), max(touching) if self.is_given else max(place[each] for each in self.changes)


def changed_memory(
    nodes: Iterable[fx.Node], given: Container[fx.Node], harmless: Set[fx.Node] = frozenset()
) -> list[ChangedMemory]:
    """The memory of each storage that an op of `nodes` changes in place.

    Args:
        given: the nodes whose values the graph is given.
        harmless: changes that do not count.
    """
    views: dict[int, list[fx.Node]] = {}
    changes: dict[int, list[fx.Node]] = {}
    for node in nodes:
        for storage in {storage_of(value): None for value in tensors_of(node)}:
            views.setdefault(storage, []).append(node)
        for storage in () if node in harmless else _changed_storages(node):
            changes.setdefault(storage, []).append(node)
    return [
        ChangedMemory(views[storage], ops, any(each in given for each in views[storage]))
        for storage, ops in changes.items()
    ]


def _changed_storages(node: fx.Node) -> set[int]:
    return {storage_of(value) for each in changed_operands(node) for value in tensors_of(each)}


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The fake values of a node that are tensors."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []
