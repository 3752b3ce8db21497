"""The collectives of a graph that may overlap computation: the ops that each can start after, and its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxpar._torch.distributed import c10d_functional
from fxpar.graph.redistribute import local_size
from fxpar.ir.node_meta import communication, layout_of, tensor
from fxpar.ir.op_predicates import is_collective, is_free_to_recompute, is_pointwise
from fxpar.ir.overlap_options import OverlapRule

aten = torch.ops.aten

_REARRANGING = (
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten._to_copy.default,
    aten.zeros_like.default,
)
_ATTENTION_ON_CPU = (  # which PyTorch's registry leaves out
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


@dataclass(frozen=True, slots=True)
class Site:
    """A collective: its start and its wait, the rule that it falls under, and the ops that it can start after.

    num_bytes: of its result, on the rank with the largest piece.
    """

    start: fx.Node
    wait: fx.Node
    rule: OverlapRule
    sources: frozenset[fx.Node]
    num_bytes: int

    @property
    def held_bytes(self) -> int:
        """The bytes of its operand, on the rank with the largest piece; a reduce-scatter's has one result per rank."""
        given, result = tensor(self.start.all_input_nodes[0]), tensor(self.start)
        return self.num_bytes * max(1, given.numel() // max(1, result.numel()))


def find_sites(graph: fx.Graph, rules: AbstractSet[OverlapRule]) -> list[Site]:
    """The collectives of `graph` under one of the `rules`, in its order.

    A collective whose result only leaves the graph, perhaps rearranged or added to something, is under
    "reduce_scatters", as for gradients of weights. A collective of inputs alone is under "all_gathers". All others, of
    computed values that are used again, are under "input_gradients". Nothing here depends on sizes, which may differ
    between ranks.
    """
    leaving, given = _leaving(graph), _given(graph)
    sites = []
    for node in graph.nodes:
        done, waits = communication(node), [user for user in node.users if _waits(user)]
        if done is None or not waits:  # it leaves the graph while in flight
            continue
        (wait,) = waits
        rule: OverlapRule = (
            "reduce_scatters" if wait in leaving else "all_gathers" if node in given else "input_gradients"
        )
        if rule in rules:
            sources = _sources(node, through_collectives=rule == "input_gradients")
            sites.append(Site(node, wait, rule, sources, _result_bytes(wait) or done.num_bytes))
    return sites


def is_matmul(node: fx.Node) -> bool:
    """Whether `node` is a matmul, a convolution or an attention: an op that takes time to compute."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    packet = node.target.overloadpacket
    return packet in flop_registry or packet in _ATTENTION_ON_CPU


def late_ops(graph: fx.Graph, sites: Iterable[Site]) -> set[fx.Node]:
    """The waits, the ops that only rearrange their results, and all users of results that only leave the graph.

    These run when they are needed. Waits for collectives that started before the graph are included.
    """
    waits: dict[fx.Node, Site] = {site.wait: site for site in sites}
    late = {node for node in graph.nodes if _waits(node) and node.all_input_nodes[0].op == "placeholder"}
    of_leaving: set[fx.Node] = set()
    for node in graph.nodes:
        behind = any(operand in of_leaving for operand in node.all_input_nodes)
        if (node in waits and waits[node].rule == "reduce_scatters") or (behind and node.op != "output"):
            of_leaving.add(node)
        elif node in waits or (_rearranges(node) and late.issuperset(node.all_input_nodes)):
            late.add(node)
    return late | of_leaving


def waits_of(graph: fx.Graph, sites: Iterable[Site], late: AbstractSet[fx.Node]) -> dict[fx.Node, list[Site]]:
    """For each node, the sites that it must wait for unless an earlier node did, in the order of the waits."""
    starts = {site.start: site for site in sites}
    waits: dict[fx.Node, list[Site]] = {}
    for node in graph.nodes:
        behind = [operand for operand in node.all_input_nodes if operand in late or communication(operand) is not None]
        waiting = dict.fromkeys(site for operand in behind for site in waits[operand])
        waits[node] = [*waiting, starts[node]] if node in starts else list(waiting)
    return waits


def _leaving(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values only leave the graph, through collectives and ops that take next to no time."""
    leaving: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.users and all(user.op == "output" or (user in leaving and _is_passive(user)) for user in node.users):
            leaving.add(node)
    return leaving


def _given(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are computed from inputs alone, by rearrangements and collectives."""
    given: set[fx.Node] = set()
    for node in graph.nodes:
        moves = node.op == "call_function" and _moves(node)
        if node.op in ("placeholder", "get_attr") or (moves and given.issuperset(node.all_input_nodes)):
            given.add(node)
    return given


def _sources(start: fx.Node, *, through_collectives: bool) -> frozenset[fx.Node]:
    """The nearest ops that compute the operand of `start`; other collectives in between may be looked through."""
    passed: Callable[[fx.Node], bool] = _moves if through_collectives else _rearranges
    sources, pending, seen = set[fx.Node](), list(start.all_input_nodes), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "call_function" and passed(node):
            pending.extend(node.all_input_nodes)
        else:
            sources.add(node)
    return frozenset(sources)


def _result_bytes(wait: fx.Node) -> int:
    """The bytes of the largest piece of the result, over ranks; 0 if it has no layout, as a bucket of weights."""
    node = wait
    while (layout := layout_of(node)) is None:
        behind = list(node.users)
        if len(behind) != 1 or not _rearranges(behind[0]):
            return 0
        (node,) = behind
    return local_size(layout) * tensor(node).element_size()


def _moves(node: fx.Node) -> bool:
    return _rearranges(node) or is_collective(node)


def _waits(node: fx.Node) -> bool:
    return node.target is c10d_functional.wait_tensor.default


def _rearranges(node: fx.Node) -> bool:
    """Whether `node` computes nothing: a view, a copy, a cast, padding, a concatenation."""
    return bool(node.all_input_nodes) and (is_free_to_recompute(node) or node.target in _REARRANGING)


def _is_passive(node: fx.Node) -> bool:
    """Whether `node` takes next to no time."""
    return _moves(node) or is_pointwise(node.target)
