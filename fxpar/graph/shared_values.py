"""Find the values of a forward that every stage may compute for itself, in spite of in-place operations."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor, fx

from fxpar._torch.compiler import set_tensor_requires_grad, storage_of
from fxpar.ir.op_predicates import is_random
from fxpar.ir.stage import Port, PortKind

_IN_PLACE = {
    set_tensor_requires_grad,
    operator.setitem,
    *(
        getattr(operator, name)
        for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
    ),
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
    return not _tensors(node) and mutated(node) is None


def mutated(node: fx.Node) -> fx.Node | None:
    """The argument that `node` changes in place, if it does."""
    first = next(iter(node.all_input_nodes), None)
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    if node.kwargs.get("inplace") or node.target in _IN_PLACE:
        return first
    if isinstance(node.target, torch._ops.OpOverload):
        return first if node.target._schema.is_mutable else None
    if getattr(node.target, "__module__", None) == operator.and_.__module__:
        return None  # `and_` and `or_` are named so since Python has keywords of the other names
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return first if name.endswith("_") and not name.endswith("__") else None


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
    changed = {storage_of(t) for node in order if (base := mutated(node)) is not None for t in _tensors(base)}
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
        base = mutated(node)
        changed = {storage_of(t) for t in _tensors(base)} if base is not None else set()
        for storage in changed:
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
        base = mutated(node)
        if base is not None and node not in harmless:
            changed |= dict.fromkeys(map(storage_of, _tensors(base)))
    return [(min(places), max(places)) for storage in changed if (places := touching[storage])]


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []
